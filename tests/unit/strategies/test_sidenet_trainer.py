"""What trains next to a frozen network, at which learning rates, and what its checkpoint holds."""

import copy

import pytest
import torch
from strategy_samples import workload
from torch import nn

from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings
from snugfit.errors import CheckpointError
from snugfit.lean import FloatState, use_stock
from snugfit.strategies.sidenet.configurations import Configuration
from snugfit.strategies.sidenet.frozen import FrozenNetwork
from snugfit.strategies.sidenet.network import SIDE_LR, make_trainer, restore_layers, trained_names

ADAM = OptimizerSettings("adamw", lr=0.01, weight_decay=0.0)
SHAPE = (3, 32, 32)


def conv(inputs, outputs, stride=1):
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def network():
    torch.manual_seed(0)
    layers = [*conv(3, 8, 2), *conv(8, 16, 2), *conv(16, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    made = nn.Sequential(*layers, nn.Linear(16, 4))
    for layer in made:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return made


def trainer_of(module, scheme, width=0.0, micro_batches=1, side_lr=None, optimizer=ADAM, **kept):
    chain = Chain.from_module(module, SHAPE)
    frozen = FrozenNetwork(Chain.from_module(network(), SHAPE), scheme, width, "on")
    make = make_trainer(Configuration(width, **kept), frozen, side_lr)
    return make(chain, chain.to_module(), workload(optimizer=optimizer, batch_size=8), micro_batches)


def batch(count=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, *SHAPE, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def changed(trainer, *steps):
    """Names in the state dict that differ after a step."""
    before = {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}
    for step in steps or (batch(),):
        trainer.step(*step)
    return {name for name, tensor in trainer.module.state_dict().items() if not torch.equal(tensor, before[name])}


HEAD = {"11.weight", "11.bias"}


def test_head_alone():
    assert changed(trainer_of(network(), "head")) == HEAD


def test_biases_and_head():
    """Convolutions have none here; BatchNorm's train while its scale and its statistics stay."""
    assert changed(trainer_of(network(), "bias+head")) == HEAD | {"1.bias", "4.bias", "7.bias"}


def test_side_network_and_head():
    found = changed(trainer_of(network(), "rep-net", 1.0), batch(), batch())
    side = {name for name in found if name.startswith("side.")}
    assert found - side == HEAD and any("running_mean" in name for name in side)
    assert {name for name, p in trainer_of(network(), "rep-net", 1.0).module.named_parameters() if p.requires_grad} == (
        HEAD | {name for name in side if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    )


@pytest.mark.parametrize(("scheme", "width"), [("head", 0.0), ("bias+head", 0.0), ("rep-net", 1.0)])
def test_gradients_are_those_of_plain_autograd(scheme, width):
    """One step of plain SGD in float64, beside torch's own layers and autograd, BatchNorm frozen by hand."""
    module = network().double()
    settings = OptimizerSettings("sgd", lr=0.1, momentum=0.0, weight_decay=0.0, schedule="constant")
    trainer = trainer_of(module, scheme, width, optimizer=settings)
    with torch.no_grad():
        for name, parameter in trainer.module.named_parameters():
            if name.startswith("side.") and parameter.dim() == 1:
                parameter.normal_()  # or the zero scale keeps every gradient before it at zero
    oracle = copy.deepcopy(trainer.module)
    use_stock(oracle)
    oracle.train()
    for name, layer in oracle.named_modules():
        if isinstance(layer, nn.BatchNorm2d) and not name.startswith("side."):
            layer.eval()
    images, labels = batch()
    trainer.step(images.double(), labels)
    nn.functional.cross_entropy(oracle(images.double()), labels).backward()
    with torch.no_grad():
        for parameter in oracle.parameters():
            if parameter.requires_grad:
                scale = SIDE_LR if any(parameter is p for n, p in oracle.named_parameters() if "side." in n) else 1
                parameter.sub_(0.1 * scale * parameter.grad)
    for name, tensor in oracle.state_dict().items():
        torch.testing.assert_close(trainer.module.state_dict()[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("side_lr", [None, 0.002])
def test_two_learning_rates_fall_together(side_lr):
    trainer = trainer_of(network(), "rep-net", 1.0, side_lr=side_lr)
    trainer.set_lr_factor(0.5)
    rates = {name: rule.lr for name, rule in trainer.optimizers._rules.items()}
    wanted = 0.5 * (side_lr or SIDE_LR * ADAM.lr)
    assert {rates[name] for name in HEAD} == {0.005}
    assert all(rates[name] == pytest.approx(wanted) for name in rates if name.startswith("side."))


@pytest.mark.parametrize(("scheme", "width"), [("head", 0.0), ("bias+head", 0.0), ("rep-net", 1.0)])
def test_images_are_freed_when_they_are_read(scheme, width):
    trainer, (images, labels) = trainer_of(network(), scheme, width), batch()
    trainer.step(images, labels)
    assert images.numel() == 0
    images, _ = batch()
    trainer.module.eval()(images)
    assert len(images) == len(labels)


@pytest.mark.parametrize("scheme", ["head", "bias+head"])
def test_accumulation_is_exact_without_a_side_network(scheme):
    whole, parts = (trainer_of(network().double(), scheme, micro_batches=parts) for parts in (1, 2))
    images, labels = batch()
    images = images.double()
    whole.step(images.clone(), labels)
    parts.step(images[:4], labels[:4], share=0.5, update=False)
    parts.step(images[4:], labels[4:], share=0.5, update=True)
    for name, tensor in whole.module.state_dict().items():
        torch.testing.assert_close(parts.module.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)


def test_a_checkpoint_holds_what_changes_and_no_more():
    first, second = trainer_of(network(), "rep-net", 1.0), trainer_of(network(), "rep-net", 1.0)
    first.step(*batch())
    state = {group: {name: t.clone() for name, t in found.items()} for group, found in first.state().items()}
    assert not [name for name in state["model"] if not name.startswith("side.") and name not in HEAD]
    second.load_state(lambda group: state[group])
    for trainer in (first, second):
        trainer.step(*batch())
    for name, tensor in first.module.state_dict().items():
        assert torch.equal(second.module.state_dict()[name], tensor), name


def test_a_checkpoint_of_another_scheme_is_refused():
    state = trainer_of(network(), "bias+head").state()
    with pytest.raises(CheckpointError, match="another model"):
        trainer_of(network(), "head").load_state(lambda group: state[group])


def test_names():
    names = ["a.weight", "a.bias", "side.2.conv.weight", "side.2.norm.bias", "head.weight", "rebias"]
    assert trained_names(names, ["head.weight"], "head") == {"head.weight", "side.2.conv.weight", "side.2.norm.bias"}
    assert trained_names(names, ["head.weight"], "bias+head") == {"head.weight", "a.bias", "side.2.norm.bias"}


@pytest.mark.parametrize(("scheme", "width"), [("head", 0.0), ("rep-net", 1.0)])
def test_image_by_image_trains_the_same(scheme, width):
    images, labels = batch()
    whole = trainer_of(network().double(), scheme, width)
    single = trainer_of(network().double(), scheme, width, by_sample=True)
    assert any("by_sample" in name for name, _ in single.module.named_modules())
    for trainer in (whole, single):
        for _ in range(2):
            trainer.step(images.double(), labels)
    restore_layers(single.module)
    expected = whole.module.state_dict()
    assert expected.keys() == single.module.state_dict().keys()
    for name, tensor in single.module.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-10, msg=name)


def test_rounded_weights_train_as_the_same_ones_in_floats():
    """A network whose weights are what int8 makes of them trains the same in either storage."""
    images, labels = batch()
    coded = trainer_of(network(), "rep-net", 1.0, int8=True)
    rounded = FloatState(restore_layers(copy.deepcopy(coded.module)))
    module = network()
    module.load_state_dict({name: rounded[name] for name in module.state_dict()})
    floats = trainer_of(module, "rep-net", 1.0)
    for trainer in (coded, floats):
        for _ in range(2):
            trainer.step(images.clone(), labels)
    expected = floats.module.state_dict()
    for name, tensor in FloatState(restore_layers(coded.module)).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        assert tensor.dtype == expected[name].dtype
