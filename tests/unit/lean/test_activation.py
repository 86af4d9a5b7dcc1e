"""ReLU, ReLU6 and LeakyReLU that keep bits, against torch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from snugfit.lean import activation, use_lean
from snugfit.memory.tensors import saved_bytes

ACTIVATIONS = [
    kind(inplace=in_place, **options)
    for kind, options in ((nn.ReLU, {}), (nn.ReLU6, {}), (nn.LeakyReLU, {"negative_slope": 0.2}))
    for in_place in (False, True)
]
FORMATS = {"contiguous": lambda x: x, "channels_last": lambda x: x.to(memory_format=torch.channels_last),
           "transposed": lambda x: x.transpose(1, 3), "sliced": lambda x: x[:, :, ::2]}  # fmt: skip


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setitem(activation.CHUNK, "cpu", 64)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@settings(deadline=None, max_examples=15)
@given(
    size=st.tuples(*[st.integers(0, 7)] * 4), layout=st.sampled_from(sorted(FORMATS)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_equals_torchs_bit_for_bit(assert_as_stock, activation, size, layout, dtype):
    torch.manual_seed(0)
    images = FORMATS[layout]((4 * torch.randn(size)).round().to(dtype))  # zeros and sixes among them
    assert_as_stock(activation, images)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_any_number_of_dimensions(assert_as_stock, activation):
    for size in ((), (9,), (65, 3), (2, 3, 4), (2, 3, 4, 5, 6)):
        assert_as_stock(activation, 4 * torch.randn(size, dtype=torch.float64))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1)], ids=str)
def test_nan_and_infinity_are_torchs(assert_as_stock, activation):
    images = torch.tensor([1.0, -1.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0]).repeat(16)
    assert_as_stock(activation, images)


def test_the_gradient_is_not_multiplied_where_it_does_not_pass():
    layer = nn.ReLU()
    use_lean(layer)
    inputs = torch.tensor([-1.0, 1.0], requires_grad=True)
    layer(inputs).backward(torch.tensor([float("inf"), float("nan")]))
    assert inputs.grad[0] == 0 and inputs.grad[1].isnan()


@pytest.mark.parametrize("gradient_layout", ["contiguous", "channels_last", "expanded"])
def test_a_gradient_in_another_layout(gradient_layout):
    layer = nn.ReLU()
    use_lean(layer)
    images = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.randn(3, 4, 5, 6) if gradient_layout != "expanded" else torch.ones(1).expand(3, 4, 5, 6)
    gradient = FORMATS.get(gradient_layout, lambda x: x)(gradient)
    before = gradient.clone()
    layer(images).backward(gradient)
    assert torch.equal(images.grad, gradient * (images > 0)) and torch.equal(gradient, before)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_it_keeps_a_bit_per_element(activation):
    use_lean(activation)
    images = torch.randn(2, 3, 5, 5, requires_grad=True)
    inputs = images * 1
    assert saved_bytes(lambda: activation(inputs)) == 19  # of 150 elements


def test_a_negative_slope_is_torchs(assert_as_stock):
    assert_as_stock(nn.LeakyReLU(-0.5), torch.randn(50, dtype=torch.float64))


def test_numpy_and_torch_pack_the_same_bits(monkeypatch):
    values = torch.randn(333).relu_()
    packed, out, again = activation.pack(values, activation.RELU6), torch.empty(333), torch.empty(333)
    activation.masked(values, packed, 0.5, out)
    monkeypatch.setattr(activation, "_library", lambda _: torch)
    assert torch.equal(activation.pack(values, activation.RELU6), packed)
    activation.masked(values, packed, 0.5, again)
    assert torch.equal(out, again)


def test_by_hand():
    """Nine elements take two bytes, so that a plane has two: planes 0 and 1 end in a bit, plane 4 starts with one."""
    values = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 7.0])
    assert activation.pack(values, activation.RELU).tolist() == [0b10000, 0b00011]
