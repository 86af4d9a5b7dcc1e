"""The trainer of selected tensors: what trains, what stays, and what is kept in memory for it."""

import copy

import pytest
import torch
from strategy_samples import workload
from torch import nn
from torch.nn import functional as F

from snugfit._core.workload import OptimizerSettings
from snugfit.errors import CheckpointError
from snugfit.strategies.elastic.trainer import TensorTrainer, set_modes

SOME = ("3.weight", "4.bias", "9.weight", "9.bias")
OPTIMIZERS = [OptimizerSettings("sgd", lr=0.05), OptimizerSettings("adamw", lr=0.01)]


def network(dropout=0.0):
    """Two convolutions with BatchNorm whose statistics are not those of the batch, and a classifier."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()]
    layers += [nn.Conv2d(6, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(dropout)]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    for layer in (module[1], module[4]):
        nn.init.uniform_(layer.running_mean, -0.5, 0.5)
        nn.init.uniform_(layer.running_var, 0.5, 2)
    return module


def batch(count=8, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 8, 8, generator=generator, dtype=dtype)
    return images, torch.randint(0, 10, (count,), generator=generator)


def trainer(module=None, selected=SOME, optimizer=OPTIMIZERS[0], micro_batches=1, lean=True, **changes):
    module = network() if module is None else module
    work = workload(optimizer=optimizer, **changes)
    made = TensorTrainer(module, module, work, micro_batches, lean=lean)
    made.select(selected)
    return made


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def moved(before, module):
    return {name for name, value in module.state_dict().items() if not torch.equal(before[name], value)}


def state_names(made):
    return {name.rpartition("/")[0] for name in made.optimizers.state()}


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.name)
def test_only_selected_tensors_move(optimizer, lean):
    made = trainer(optimizer=optimizer, lean=lean)
    before = copied(made.module)
    for seed in range(3):
        made.step(*batch(seed=seed))
    assert moved(before, made.module) == set(SOME), "BatchNorm's statistics do not move either"
    assert all(parameter.grad is None for parameter in made.module.parameters())
    assert state_names(made) == set(SOME) == set(made.selected)


def test_selecting_anew_keeps_the_momentum_of_those_that_stay():
    made = trainer()
    made.step(*batch())
    before = {name: value.clone() for name, value in made.optimizers.state().items()}
    made.select(["0.weight", "4.bias", "9.weight"])
    kept = made.optimizers.state()
    assert set(kept) == {"4.bias/momentum_buffer", "9.weight/momentum_buffer"}
    assert all(torch.equal(before[name], value) for name, value in kept.items())
    assert made.selected == ("0.weight", "4.bias", "9.weight")
    weights = copied(made.module)
    made.step(*batch(seed=2))
    assert moved(weights, made.module) == {"0.weight", "4.bias", "9.weight"}
    assert made.module[0].weight.requires_grad and not made.module[3].weight.requires_grad


def test_a_tensor_that_comes_back_starts_without_momentum():
    made = trainer(optimizer=OPTIMIZERS[1])
    made.step(*batch())
    made.select(["9.weight", "9.bias"])
    made.select(SOME)
    assert state_names(made) == {"9.weight", "9.bias"}


def test_momentum_of_those_that_go_leaves_memory():
    import gc
    import weakref

    made = trainer()
    made.step(*batch())
    gone = weakref.ref(made.optimizers.state()["3.weight/momentum_buffer"])
    stays = weakref.ref(made.optimizers.state()["9.weight/momentum_buffer"])
    made.select(["9.weight"])
    gc.collect()
    assert gone() is None and stays() is not None


def test_training_goes_on_after_a_selection_as_if_there_had_been_none():
    """Momentum, step counter and learning rate of what stays are untouched."""
    for optimizer in OPTIMIZERS:
        one, other = trainer(optimizer=optimizer), trainer(optimizer=optimizer)
        for made in (one, other):
            made.set_lr_factor(0.3)
            made.step(*batch())
        other.select([*SOME, "0.weight"])
        other.select(SOME)
        for made in (one, other):
            made.step(*batch(seed=2))
        assert not moved(copied(one.module), other.module)


def test_the_loss_has_the_workloads_label_smoothing():
    images, labels = batch()
    made = trainer(label_smoothing=0.3)
    set_modes(made.module)
    expected = F.cross_entropy(made.module(images), labels, label_smoothing=0.3).item()
    assert made.step(images, labels).loss == pytest.approx(expected, rel=1e-5)


def test_a_new_selection_takes_the_present_learning_rate():
    made = trainer()
    made.set_lr_factor(0.0)
    made.select(["0.weight"])
    before = copied(made.module)
    made.step(*batch())
    assert not moved(before, made.module)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("selected", [SOME, ("9.weight",), ("0.weight", "1.weight", "4.bias")])
def test_gradients_are_those_of_full_autograd(selected, lean):
    module = network().double()
    reference = copy.deepcopy(module)
    set_modes(reference)
    images, labels = batch(dtype=torch.float64)
    nn.functional.cross_entropy(reference(images), labels).backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    made = trainer(module, selected, micro_batches=2, lean=lean)
    made.step(images, labels, 1.0, update=False)
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert set(found) == set(selected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12)


def test_a_step_in_backward_is_sgd_by_hand():
    module = network().double()
    reference = copy.deepcopy(module)
    set_modes(reference)
    chosen = [parameter for name, parameter in reference.named_parameters() if name in SOME]
    optimizer = torch.optim.SGD(chosen, lr=0.05, momentum=0.9, weight_decay=5e-4)
    made = trainer(module, optimizer=OptimizerSettings("sgd", lr=0.05, momentum=0.9, weight_decay=5e-4))
    for seed in range(3):
        images, labels = batch(dtype=torch.float64, seed=seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(images), labels).backward()
        optimizer.step()
        made.step(images, labels)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-9, atol=1e-12)


def test_micro_batches_add_up_to_the_step_of_the_whole_batch():
    whole, parts = trainer(network().double()), trainer(network().double(), micro_batches=2)
    images, labels = batch(dtype=torch.float64)
    whole.step(images, labels)
    parts.step(images[:4], labels[:4], 0.5, update=False)
    parts.step(images[4:], labels[4:], 0.5, update=True)
    for name, value in whole.module.state_dict().items():
        torch.testing.assert_close(parts.module.state_dict()[name], value, rtol=1e-9, atol=1e-12)
    assert all(parameter.grad is None for parameter in parts.module.parameters())
    assert len(whole.step_seconds) == len(parts.step_seconds) == 1, "seconds are those of whole steps"


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_dry_step_changes_nothing(micro_batches):
    dry, plain = (trainer(network(0.2), micro_batches=micro_batches) for _ in range(2))
    for made in (dry, plain):
        torch.manual_seed(5)
        made.step(*batch(), 1.0, update=True)
    before = copied(dry.module)
    momentum = {name: value.clone() for name, value in dry.optimizers.state().items()}
    for _ in range(2):
        dry.dry_step(*batch(seed=7))
    assert not moved(before, dry.module), "weights and BatchNorm's buffers"
    found = dry.optimizers.state()
    assert found.keys() == momentum.keys() and all(torch.equal(momentum[name], value) for name, value in found.items())
    assert all(parameter.grad is None for parameter in dry.module.parameters())
    assert len(dry.step_seconds) == 1, "what was tried out does not count"
    for made in (dry, plain):
        torch.manual_seed(6)
        made.step(*batch(seed=3), 1.0, update=True)
    assert not moved(copied(plain.module), dry.module), "its hooks still work"


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_dry_step_of_some_tensors_passes_no_gradient_to_the_others(micro_batches):
    made, seen = trainer(micro_batches=micro_batches), set()
    for name, parameter in made.optimizers.parameters.items():
        parameter.register_hook(lambda gradient, name=name: seen.add(name))
    before, last = copied(made.module), made.selected[-1]
    made.dry_step(*batch(), only={last})
    assert seen == {last} and not moved(before, made.module)
    made.dry_step(*batch())
    assert seen == set(made.selected)
    assert all(parameter.requires_grad for parameter in made.optimizers.parameters.values())


def test_a_dry_step_of_accumulation_holds_gradients_beside_the_second_forward_pass():
    """As every micro-batch after the first one does: what the dry run takes must be the most that a step takes."""
    held = []

    def look(module, _):
        held.append(module[3].weight.grad is not None)

    made = trainer(micro_batches=2)
    made.module.register_forward_pre_hook(look)
    made.dry_step(*batch())
    assert held == [False, True]
    once = trainer()
    once.module.register_forward_pre_hook(look)
    once.dry_step(*batch())
    assert held == [False, True, False]


def test_a_dry_step_that_fails_leaves_the_trainer_as_it_was():
    made, plain = trainer(), trainer()
    with pytest.raises(IndexError):
        made.dry_step(batch()[0], torch.full((8,), 77))
    for each in (made, plain):
        each.step(*batch())
    assert not moved(copied(plain.module), made.module)


def test_norms_keep_to_their_statistics_while_their_tensors_train():
    made = trainer(selected=("1.weight", "1.bias", "4.weight", "4.bias"))
    before = copied(made.module)
    made.step(*batch())
    assert moved(before, made.module) == {"1.weight", "1.bias", "4.weight", "4.bias"}
    made.module.eval()
    logits = made.module(batch()[0])
    set_modes(made.module)
    torch.testing.assert_close(made.module(batch()[0]), logits)


def test_dropout_is_active_in_steps():
    made = trainer(network(0.5), selected=("9.weight",))
    made.module.eval()
    made.set_lr_factor(0.0)
    losses = set()
    for seed in range(4):
        torch.manual_seed(seed)
        losses.add(made.step(*batch()).loss)
    assert len(losses) == 4


def test_bfloat16_trains_float32_weights():
    made, exact = trainer(precision="bfloat16"), trainer()
    before = copied(made.module)
    low, high = made.step(*batch()), exact.step(*batch())
    made.dry_step(*batch())
    assert low.loss != high.loss and low.loss == pytest.approx(high.loss, rel=0.05)
    assert {value.dtype for value in made.module.parameters()} == {torch.float32}
    assert {value.dtype for value in made.optimizers.state().values()} == {torch.float32}
    assert moved(before, made.module) == set(SOME)


def test_what_the_user_froze_never_trains():
    module = network()
    module[3].weight.requires_grad_(False)
    made = trainer(module, selected=("3.weight", "3.bias", "9.weight"))
    assert made.selected == ("3.bias", "9.weight") and "3.weight" not in made.parameters
    before = copied(module)
    made.step(*batch())
    assert moved(before, module) == {"3.bias", "9.weight"} and not module[3].weight.requires_grad


def test_a_state_is_taken_up_by_a_trainer_of_the_same_selection():
    for optimizer in OPTIMIZERS:
        one, other = trainer(optimizer=optimizer), trainer(optimizer=optimizer)
        one.step(*batch())
        saved = {group: {k: v.clone() for k, v in members.items()} for group, members in one.state().items()}
        other.load_state(saved.__getitem__)
        for made in (one, other):
            made.step(*batch(seed=2))
        assert not moved(copied(one.module), other.module)


def test_a_state_of_another_selection_is_refused():
    one, other = trainer(), trainer(selected=("0.weight",))
    one.step(*batch())
    with pytest.raises(CheckpointError, match="belongs to no parameter"):
        other.load_state(one.state().__getitem__)


def test_seconds_are_those_of_the_present_selection():
    made = trainer()
    made.step(*batch())
    assert len(made.step_seconds) == 1 and made.step_seconds[0] > 0
    made.select(SOME)
    assert made.step_seconds == []


def test_a_trainer_that_is_released_leaves_the_module_as_it_was():
    module = network()
    module[0].bias.requires_grad_(False)
    made = trainer(module)
    made.step(*batch())
    made.release()
    assert [name for name, parameter in module.named_parameters() if not parameter.requires_grad] == ["0.bias"]
    assert made.selected == () and all(parameter.grad is None for parameter in module.parameters())
    made.module(batch()[0]).sum().backward()
    assert module[3].weight.grad is not None, "no hook is left that would apply it"
