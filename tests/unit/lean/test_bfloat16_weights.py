"""Layers with weights in bfloat16: float64 layers with the rounded weights as oracle, memory, gradients in float32."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from snugfit.lean import use_lean_convolutions
from snugfit.lean.bfloat16_weights import store_bfloat16, use_float_gradients
from snugfit.memory.autocast import autocast
from snugfit.memory.tensors import tensor_peak_bytes


def stored(layer):
    store_bfloat16(layer)
    use_float_gradients(layer)
    return layer


def compared(layer, inputs):
    """Output and gradients of a layer with a rounded weight, each with that of a float64 layer with this weight."""
    made = stored(copy.deepcopy(layer))
    oracle = copy.deepcopy(layer).double()
    oracle.weight.data = made.weight.detach().double()
    mine, theirs = inputs.clone().requires_grad_(), inputs.double().requires_grad_()
    found, want = made(mine), oracle(theirs)
    torch.manual_seed(5)
    gradient = torch.randn(found.shape)
    found.backward(gradient)
    want.backward(gradient.double())
    pairs = [(found, want), (mine.grad, theirs.grad), (made.weight.grad, oracle.weight.grad)]
    return pairs + ([(made.bias.grad, oracle.bias.grad)] if layer.bias is not None else [])


def assert_close(pairs):
    for mine, theirs in pairs:
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


@given(
    st.integers(1, 3),
    st.sampled_from([(3, 4, 1), (4, 4, 4), (4, 6, 2)]),
    st.integers(1, 3),
    st.sampled_from([0, 1, "same"]),
    st.integers(1, 2),
    st.integers(3, 9),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_convolution_is_that_of_float64_with_the_rounded_weight(batch, sizes, kernel, padding, stride, side, bias):
    torch.manual_seed(side)
    channels, filters, groups = sizes
    stride = 1 if padding == "same" else stride
    layer = nn.Conv2d(channels, filters, kernel, stride, padding, groups=groups, bias=bias)
    images = torch.randn(batch, channels, side, side).to(memory_format=torch.channels_last)
    assert_close(compared(layer, images))


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_that_of_float64_with_the_rounded_weight(shape, bias):
    torch.manual_seed(0)
    assert_close(compared(nn.Linear(5, 7, bias=bias), torch.randn(shape)))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def test_only_weights_of_convolutions_and_linear_layers_are_stored():
    module = network()
    module[0].bias.requires_grad_(False)
    names = set(module.state_dict())
    stored(module)
    kinds = {name: value.dtype for name, value in module.state_dict().items() if value.is_floating_point()}
    assert {name for name, kind in kinds.items() if kind == torch.bfloat16} == {"0.weight", "4.weight"}
    assert set(module.state_dict()) == names
    before = module[4].weight
    assert store_bfloat16(module) is None and torch.equal(module[4].weight, before)


def test_frozen_weights_and_subclasses_stay():
    class Own(nn.Linear):
        pass

    module = nn.Sequential(nn.Conv2d(1, 1, 1).requires_grad_(False), Own(2, 2))
    stored(module)
    assert {value.dtype for value in module.parameters()} == {torch.float32} and type(module[1]) is Own


def test_recomputation_gives_the_same_gradients():
    module, images = stored(network()), torch.randn(2, 3, 8, 8)
    again = stored(network())
    module(images).sum().backward()
    checkpoint(again, images, use_reentrant=False).sum().backward()
    for mine, theirs in zip(again.parameters(), module.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        assert torch.equal(mine.grad, theirs.grad)


def test_evaluation_and_autocast():
    module, images = stored(network()), torch.randn(2, 3, 8, 8)
    wide = network()
    wide.load_state_dict({name: value.float() for name, value in module.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(images), wide.eval()(images))
    for net in (module, wide):
        net.train()
        with autocast("cpu"):
            net(images).float().sum().backward()
    use_lean_convolutions(wide)
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
    for mine, theirs in zip(module.parameters(), wide.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Conv2d(256, 256, 3, padding=1), (1, 256, 8, 8)), (nn.Linear(2048, 256), (2, 2048))]
)
def test_a_step_never_holds_a_converted_weight_and_its_gradient(layer, shape, device):
    module = stored(nn.Sequential(copy.deepcopy(layer), nn.Flatten()).to(device))
    use_float_gradients(module)
    handle = module[0].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    inputs = torch.randn(shape, device=device, requires_grad=True)
    weight = module[0].weight
    peak = tensor_peak_bytes(lambda: module(inputs).sum().backward(), [module, inputs])
    handle.remove()
    assert 4 * weight.numel() <= peak - weight.nbytes < 4.5 * weight.numel()
