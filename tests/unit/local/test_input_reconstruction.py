"""The reconstruction term of a local loss: its value and gradients, where it applies, and that no exit keeps it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit.errors import UsageError
from snugfit.local import NetworkStats, UnitShape, build_local_loss
from snugfit.local.assignment import Layout
from snugfit.local.look_ahead import Decoder
from snugfit.strategies.blockwise.worker import LocalUnit, initialise_loss

NETWORK = NetworkStats(8, 8, 4)
NAME = "auglocal:depth=1,reconstruction=0.5"


def layout_of(name=NAME, sizes=(), model="resnet20"):
    with torch.device("meta"):
        chain = Chain.from_module(models.build(model, 10, 32, 3), (3, 32, 32))
    return Layout.of(chain, name, 10, sizes)


def test_the_term_is_the_squared_error_of_the_input_at_half_size():
    torch.manual_seed(0)
    decoder = Decoder(6, 3).double().eval()
    features = torch.randn(2, 6, 4, 4, dtype=torch.float64, requires_grad=True)
    inputs = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    target = torch.stack([inputs[..., i::2, j::2] for i in (0, 1) for j in (0, 1)]).mean(0)
    expected = (decoder.layers(features) - target).square().mean()  # features have the target's size already
    term = decoder(features, inputs)
    assert torch.allclose(term, expected, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda each: decoder(each, inputs), (features,))


def test_features_of_another_size_are_resized():
    decoder = Decoder(6, 3).eval()
    features, inputs = torch.randn(2, 6, 2, 3), torch.randn(2, 3, 9, 8)
    resized = F.interpolate(features, (4, 4), mode="bilinear")
    expected = F.mse_loss(decoder.layers(resized), F.avg_pool2d(inputs, 2))
    assert torch.allclose(decoder(features, inputs), expected)


@pytest.mark.parametrize(
    ("output", "inputs"), [((8, 4, 4), ()), ((8, 4, 4), (3, 1, 8)), ((8, 4, 4), (12,)), ((12,), (3, 8, 8))]
)
def test_without_two_feature_maps_there_is_no_term(output, inputs):
    loss = build_local_loss(NAME, UnitShape(output, input_shape=inputs), NETWORK)
    assert loss.added_loss(torch.randn(2, *output), torch.randn(2, *inputs)) is None


def test_the_weight_scales_the_term_and_zero_makes_no_decoder():
    unit = UnitShape((8, 4, 4), input_shape=(3, 8, 8))
    loss, features, inputs = (
        build_local_loss(NAME, unit, NETWORK).eval(),
        torch.randn(2, 8, 4, 4),
        torch.randn(2, 3, 8, 8),
    )
    assert torch.equal(loss.added_loss(features, inputs), 0.5 * loss.decoder(features, inputs))
    none = build_local_loss("auglocal:depth=1,reconstruction=0", unit, NETWORK)
    assert none.added_loss(features, inputs) is None
    assert none.additional_parameters < loss.additional_parameters
    assert not loss.gives_up_gradient


def test_the_signal_counts_the_decoder():
    """By hand: 3x3 convolutions of 8 to 12 and 12 to 3 channels on 4x4 pixels, forward and both gradients."""
    unit = UnitShape((8, 4, 4), input_shape=(3, 8, 8))
    with_term, without = (
        build_local_loss(f"auglocal:depth=1,reconstruction={weight}", unit, NETWORK) for weight in (0.5, 0)
    )
    assert with_term.signal_macs(unit) - without.signal_macs(unit) == 3 * 16 * 9 * 12 * (8 + 3)


@pytest.mark.parametrize("weight", ["-1", "nan", "inf"])
def test_a_weight_that_is_no_weight_is_refused(weight):
    with pytest.raises(UsageError, match=f"reconstruction={weight} must be"):
        build_local_loss(f"auglocal:reconstruction={weight}", UnitShape((8, 8, 8)), NETWORK)


def test_modules_read_their_own_input_and_the_last_one_has_the_head_alone():
    layout = layout_of(sizes=(4, 3, 3))
    shapes = [module.input_shape for module in layout.modules]
    channels = [layout.make_loss(index).decoder.layers[-1].out_channels for index in (0, 1)]
    assert channels == [shapes[0][0], shapes[1][0]]
    features = torch.empty(2, *layout.modules[2].output_shape, device="meta")
    assert layout.make_loss(2).added_loss(features, torch.empty(2, *shapes[2], device="meta")) is None


def test_an_exit_has_no_decoder():
    with_term, without = layout_of(sizes=(5, 5)), layout_of("auglocal:depth=1", sizes=(5, 5))
    assert with_term.exit_parameters(0) == without.exit_parameters(0)
    loss = with_term.make_loss(0)
    names = [name for name, _ in with_term.exit_model(0, loss).named_parameters()]
    assert names == [name for name, _ in without.exit_model(0).named_parameters()]


def test_a_step_of_a_module_has_the_gradients_of_the_sum():
    """Against autograd on the same module, local loss and decoder."""
    layout = layout_of(sizes=(5, 5))
    unit, loss = layout.modules[0].module, layout.make_loss(0)
    unit.to_empty(device="cpu")
    initialise_loss(loss, 3)
    for each in unit.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    inputs, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
    before = {name: p.detach().clone() for name, p in [*unit.named_parameters(), *loss.named_parameters()]}
    unit.train(), loss.train()
    features = unit(inputs)
    objective = loss(features, labels).loss + 0.5 * loss.decoder(features, inputs)
    parameters = [*unit.parameters(), *loss.parameters()]
    gradients = torch.autograd.grad(objective, parameters)
    settings = OptimizerSettings("sgd", lr=0.1, momentum=0.0, weight_decay=0.0)
    workload = Workload("resnet20", "d", (3, 32, 32), 10, 8, 1, 1, optimizer=settings)
    _, result = LocalUnit(unit, loss, workload).step(inputs, labels)
    assert result.loss == pytest.approx(objective.item(), rel=1e-5)
    after = dict([*unit.named_parameters(), *loss.named_parameters()])
    for (name, old), gradient in zip(before.items(), gradients, strict=True):
        assert torch.allclose(after[name], old - 0.1 * gradient, atol=1e-5), name
    assert isinstance(loss.decoder, nn.Module)
