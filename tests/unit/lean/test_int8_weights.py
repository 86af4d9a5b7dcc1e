"""Frozen weights in 8 bits: a bound on every value, torch's numbers for the rounded weights, a quarter of the bytes."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from snugfit import _models as models
from snugfit._storage.tensor_file import write_tensors
from snugfit.errors import ModelError
from snugfit.lean import FloatState, LeanConv2d, StandardisedConv2d, restore_float, store_int8, use_lean
from snugfit.lean.int8_weights import Int8Conv2d, Int8Linear, dequantise, quantise
from snugfit.memory.tensors import LiveBytes, saved_bytes


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(1, 7), st.floats(1e-20, 1e20), st.integers(0, 1000))
def test_no_value_moves_by_more_than_half_a_scale_of_its_own_channel(filters, values, factor, seed):
    weight = torch.randn(filters, values, generator=torch.Generator().manual_seed(seed)) * factor
    weight[seed % filters] *= 1e-3
    codes, scale = quantise(weight)
    error = (dequantise(codes, scale).double() - weight.double()).abs()
    largest = weight.double().abs().amax(1, keepdim=True)
    assert (error <= largest / 254 * (1 + 1e-4)).all()
    assert codes.dtype == torch.int8 and codes.abs().amax(1).eq(127).all()


def test_channels_of_zeros_stay_zero():
    weight = torch.zeros(2, 3, 1, 1)
    weight[1] = -1
    assert torch.equal(dequantise(*quantise(weight)), weight)


def conv(**options):
    return nn.Conv2d(4, 6, 3, **options)


LAYERS = {
    "plain": conv,
    "groups": lambda: conv(stride=2, padding=1, groups=2, bias=False),
    "dilation": lambda: conv(dilation=2, padding="same"),
    "reflect": lambda: conv(padding=1, padding_mode="reflect"),
    "linear": lambda: nn.Linear(9, 6),
    "linear without bias": lambda: nn.Linear(9, 6, bias=False),
}


@pytest.mark.parametrize("case", list(itertools.product(LAYERS, *[(False, True)] * 3)), ids=str)
def test_numbers_are_torchs_own_for_the_rounded_weight(case):
    name, train_input, train_bias, lean = case
    torch.manual_seed(0)
    stock = LAYERS[name]().double().requires_grad_(False)
    stock.weight.copy_(dequantise(*quantise(stock.weight)))
    if stock.bias is not None:
        stock.bias.requires_grad_(train_bias)
    stored = copy.deepcopy(stock)
    if lean:
        use_lean(stored)
    store_int8(stored)
    inputs, results = torch.randn(2, 4, 9, 9, dtype=torch.float64), []
    for layer in (stored, stock):
        leaf = inputs.clone().requires_grad_(train_input)
        output = layer(leaf)
        if output.requires_grad:
            output.square().sum().backward()
        results.append([output.detach(), leaf.grad, None if layer.bias is None else layer.bias.grad])
    for mine, theirs in zip(*results, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Linear])
def test_single_samples_and_autocast(kind):
    torch.manual_seed(0)
    layer = (kind(4, 3, 3) if kind is nn.Conv2d else kind(8, 3)).requires_grad_(False)
    store_int8(layer)
    maps = torch.randn(4, 8, 8, requires_grad=True)
    assert torch.allclose(layer(maps), layer(maps.detach()), atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(maps)
    assert output.dtype == torch.bfloat16
    (low,) = torch.autograd.grad(output.float().square().sum(), maps)
    (high,) = torch.autograd.grad(layer(maps).square().sum(), maps)
    assert low.dtype == torch.float32 and (low - high).norm() < 0.02 * high.norm()


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 8)], ids=lambda layer: type(layer).__name__
)
def test_between_the_passes_nothing_in_floats_is_kept(layer):
    store_int8(layer.requires_grad_(False))
    inputs = torch.randn(2, 8, 8, 8, requires_grad=True)
    assert saved_bytes(lambda: layer(inputs), layer.buffers()) == 0


def test_state_dict_and_back():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).requires_grad_(False)
    use_lean(model)
    images, float_state = torch.randn(2, 3, 4, 4), {name: each.clone() for name, each in model.state_dict().items()}
    store_int8(model.eval())
    state = model.state_dict()
    assert state.keys() - float_state.keys() == {f"{i}.weight_{kind}" for i in (0, 3) for kind in ("int8", "scale")}
    assert float_state.keys() - state.keys() == {"0.weight", "3.weight"}
    assert {name for name, _ in model.named_parameters()} == {"0.bias", "1.weight", "1.bias", "3.bias"}
    output, rounded = model(images), model[0].weight
    other = copy.deepcopy(model)
    for each in other.buffers():
        each.zero_()
    other.load_state_dict(state)
    assert torch.equal(other(images), output)
    other[0].weight_int8.zero_()
    other.load_state_dict(float_state)
    assert torch.equal(other(images), output) and other[0].weight_int8.dtype == torch.int8
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        nn.Sequential(nn.Conv2d(3, 4, 3)).load_state_dict({k: v for k, v in state.items() if k.startswith("0.")})
    restore_float(model)
    assert model.state_dict().keys() == float_state.keys() and torch.equal(model[0].weight, rounded)
    assert list(dict(model[0].named_parameters())) == ["weight", "bias"] and not model[0].weight.requires_grad
    assert type(model[0]) is LeanConv2d and type(model[3]) is nn.Linear and torch.equal(model(images), output)
    store_int8(model)
    assert torch.equal(model(images), output)


def test_floats_can_be_written_without_ever_having_all_of_them(tmp_path):
    model = nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(6)), nn.BatchNorm2d(64)).requires_grad_(False)
    model[6].requires_grad_(True)
    store_int8(model)
    counter, before = LiveBytes(), sum(value.nbytes for value in model.state_dict().values())
    with counter:
        write_tensors(tmp_path / "model.safetensors", FloatState(model))
    assert 0 < counter.peak < 4 * 64 * 64 * 9 * 4, "not all six of them"
    assert sum(value.nbytes for value in model.state_dict().values()) == before, "it stays in 8 bits"
    written, floats = load_file(tmp_path / "model.safetensors"), dict(FloatState(model))
    restore_float(model)
    expected = model.state_dict()
    assert written.keys() == floats.keys() == expected.keys()
    assert all(
        torch.equal(written[name], value) and torch.equal(floats[name], value) for name, value in expected.items()
    )
    assert dict(FloatState(model)).keys() == expected.keys(), "with nothing stored it is the state dict"


def test_weights_that_train_stay_floats_and_are_refused_by_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), StandardisedConv2d(4, 4, 1), nn.BatchNorm2d(4))
    with pytest.raises(ModelError, match="freeze layers first"):
        store_int8(model)
    model.requires_grad_(False)[1].weight.requires_grad_(True)
    with pytest.raises(ModelError, match="weight of 1 is trained"):
        store_int8(model, ["0", "1"])
    for name in ("3", "2", "4"):
        with pytest.raises(ModelError, match=f"{name} is not a convolution or linear layer"):
            store_int8(model, ["0", name])
    assert type(model[0]) is nn.Conv2d
    store_int8(model)
    assert [type(each) for each in model] == [Int8Conv2d, nn.Conv2d, StandardisedConv2d, nn.BatchNorm2d]
    with pytest.raises(ModelError, match="0 is not a convolution or linear layer with a float weight"):
        store_int8(model, ["0"])


def held_bytes(model):
    with LiveBytes() as live:
        for tensor in (*model.parameters(), *model.buffers()):
            live.add(tensor)
    return live.live


def test_a_network_holds_a_quarter_of_its_bytes_and_makes_one_layers_floats_at_a_time():
    with torch.device("meta"):
        model = models.build("mobilenet_v2", 10, 32).requires_grad_(False).eval()
    use_lean(model)
    before, largest = held_bytes(model), max(each.numel() for each in model.parameters()) * 4

    def peak(images):
        with LiveBytes() as live:
            for tensor in (*model.parameters(), *model.buffers(), images):
                live.add(tensor)
            model(images).sum().backward()
        return live.peak

    images = torch.empty(1, 3, 32, 32, device="meta", requires_grad=True)
    floats = peak(images)
    store_int8(model)
    after = held_bytes(model)
    assert 0.25 * before < after < 0.3 * before
    assert peak(images) < floats - (before - after) + 1.01 * largest
    assert isinstance(model.classifier[1], Int8Linear)


def test_memory_format_of_a_weight_stays():
    layer = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last).requires_grad_(False)
    store_int8(layer)
    assert layer.weight_int8.is_contiguous(memory_format=torch.channels_last)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
