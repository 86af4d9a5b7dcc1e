"""Convolutions of which something is frozen, against torch's own and in what they keep."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from snugfit.lean import use_lean
from snugfit.memory.tensors import saved_bytes, tensor_peak_bytes


@st.composite
def cases(draw):
    """A convolution, a map that it takes, and what of both trains."""
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel, dilation, groups = draw(pair), draw(pair), draw(st.integers(1, 3))
    mode = draw(st.sampled_from(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]))
    padding = draw(st.one_of(st.just("same"), st.just("valid"), st.tuples(st.integers(0, 2), st.integers(0, 2))))
    stride = (1, 1) if padding == "same" else draw(pair)
    per_group = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3)]))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = [each + draw(st.integers(0, 4)) for each in reach]  # more than "same" pads, as "reflect" wants
    if mode == "reflect" and not isinstance(padding, str):
        size = [max(each, pad + 1) for each, pad in zip(size, padding, strict=True)]
    if mode == "circular" and not isinstance(padding, str):
        size = [max(each, pad) for each, pad in zip(size, padding, strict=True)]
    conv = nn.Conv2d(
        groups * per_group[0], groups * per_group[1], kernel, stride, padding, dilation, groups,
        draw(st.booleans()), mode,
        dtype=torch.float64,
    )  # fmt: skip
    images = torch.randn(draw(st.integers(1, 3)), conv.in_channels, *size, dtype=torch.float64)
    return conv, images, draw(st.booleans()), draw(st.tuples(*[st.booleans()] * 3))


@settings(deadline=None, max_examples=150)
@given(cases())
def test_equals_torchs(assert_as_stock, case):
    conv, images, last, (train_input, train_weight, train_bias) = case
    conv.weight.requires_grad_(train_weight)
    if conv.bias is not None:
        conv.bias.requires_grad_(train_bias)
    if last:
        conv, images = (each.to(memory_format=torch.channels_last) for each in (conv, images))
    assert_as_stock(conv, images, train_input=train_input, tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"groups": 8}, {"dilation": 2}, {"stride": 2, "groups": 2}, {"padding": 0}], ids=str
)
def test_the_inputs_gradient_is_torchs_bit_for_bit(assert_as_stock, options, dtype):
    conv = nn.Conv2d(8, 16, 3, **{"padding": 1, **options}, dtype=dtype).requires_grad_(False)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        conv = conv.to(memory_format=memory_format)
        for batch in (1, 4):
            assert_as_stock(conv, torch.randn(batch, 8, 20, 20, dtype=dtype).to(memory_format=memory_format))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("trains", ["input", "weight"])
@pytest.mark.parametrize("last", ["map", "weight"])
@pytest.mark.parametrize(
    "options",
    [{}, {"kernel_size": 1, "padding": 0}, {"groups": 8}, {"dilation": 2}, {"stride": 2, "groups": 2}],
    ids=str,
)
def test_map_and_weight_may_differ_in_memory_format(assert_as_stock, options, last, trains, autocast):
    """The kernel converts what is not in its format; a stand-in without memory ended the process there."""
    conv = nn.Conv2d(8, 16, **{"kernel_size": 3, "padding": 1, **options})
    images = torch.randn(3, 8, 12, 10)
    conv.weight.requires_grad_(trains == "weight")
    if last == "map":
        images = images.to(memory_format=torch.channels_last)
    else:
        conv = conv.to(memory_format=torch.channels_last)
    assert_as_stock(
        conv, images, train_input=trains == "input", autocast=autocast, tolerance=1e-2 if autocast else 1e-5
    )


@pytest.mark.parametrize("size", [(4, 9, 9), (0, 4, 9, 9)], ids=str)
@pytest.mark.parametrize("options", [{}, {"padding_mode": "reflect"}, {"groups": 2}], ids=str)
def test_without_a_batch_axis_and_without_images(assert_as_stock, size, options):
    if 0 in size and "padding_mode" in options:
        pytest.skip("torch pads no empty batch")
    conv = nn.Conv2d(4, 6, 3, padding=1, dtype=torch.float64, **options)
    for train_weight in (False, True):
        conv.weight.requires_grad_(train_weight)
        assert_as_stock(conv, torch.randn(size, dtype=torch.float64), tolerance=1e-10)


def kept(conv, images):
    """Names of what the convolution keeps."""
    found = []
    names = {images.data_ptr(): "input", conv.weight.data_ptr(): "weight"}

    def keep(tensor):
        found.append(names.get(tensor.data_ptr(), f"another of {tuple(tensor.shape)}"))
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        conv(images)
    return set(found)


@pytest.mark.parametrize("side", [3, 9])
@pytest.mark.parametrize("options", [{}, {"groups": 3}, {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}])
def test_it_keeps_what_its_gradients_need(options, side):
    for train_input, train_weight, train_bias in itertools.product((False, True), repeat=3):
        conv = nn.Conv2d(3, 6, 3, **options)
        use_lean(conv)
        conv.weight.requires_grad_(train_weight)
        conv.bias.requires_grad_(train_bias)
        images = torch.randn(2, 3, side, side, requires_grad=train_input)
        found = kept(conv, images)
        if not train_weight:
            assert found == ({"weight"} if train_input else set())
        elif not options:
            assert "input" in found


def test_a_frozen_network_keeps_no_map_but_bits():
    stretch = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True),
        nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 32, 1), nn.LeakyReLU(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2),
    ).eval().requires_grad_(False)  # fmt: skip
    images = torch.randn(2, 8, 16, 16, requires_grad=True)
    held = [*stretch.parameters(), *stretch.buffers(), images]
    stock = saved_bytes(lambda: stretch(images), held)
    use_lean(stretch)
    map_, half = 2 * 16 * 16 * 16, 2 * 16 * 8 * 8
    scales, bits, places = 2 * 4 * 16, 2 * map_ // 8 + 2 * half // 8, half
    assert saved_bytes(lambda: stretch(images), held) == scales + bits + places
    assert stock > 10 * (scales + bits + places)


@pytest.mark.parametrize("groups", [1, 16])
def test_a_frozen_convolutions_backward_pass_makes_one_map(groups):
    """The stand-in for the input takes no room while the gradient is made."""
    conv = nn.Conv2d(16, 16, 3, padding=1, groups=groups).requires_grad_(False)
    use_lean(conv)
    images = torch.randn(4, 16, 32, 32, requires_grad=True)
    output, gradient = conv(images), torch.randn(4, 16, 32, 32)
    peak = tensor_peak_bytes(lambda: torch.autograd.grad(output, images, gradient))
    assert images.nbytes <= peak < 1.5 * images.nbytes


@pytest.mark.parametrize("train", list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"padding": "same", "dilation": 2}, {"groups": 4}, {"padding": 1, "padding_mode": "reflect"}],
    ids=str,
)
def test_autocast(assert_as_stock, train, options):
    conv = nn.Conv2d(4, 8, 2, **options)
    train_input, conv.weight.requires_grad = train
    assert_as_stock(conv, torch.randn(2, 4, 9, 9), train_input=train_input, tolerance=2**-6, autocast=True)


def test_autocast_keeps_the_low_precision_of_a_map_and_no_copy_of_a_weight():
    conv = nn.Conv2d(4, 8, 3)
    use_lean(conv)
    images = torch.randn(2, 4, 9, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert saved_bytes(lambda: conv(images), [conv.weight, conv.bias]) == images.nbytes // 2
        conv.weight.requires_grad_(False)
        assert saved_bytes(lambda: conv(images.requires_grad_()), [conv.weight, conv.bias]) == 0


def test_autocast_hands_no_copy_without_a_graph_to_others():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    use_lean(conv)
    images = torch.randn(2, 4, 9, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        twice = conv(conv(images))  # at first the input has no gradient, then it has
        (gradient,) = torch.autograd.grad(twice.sum(), conv.weight, retain_graph=True)
        direct = nn.functional.conv2d(images.bfloat16(), conv.weight, conv.bias, padding=1)
    assert gradient.abs().sum() > 0 and direct.requires_grad
    assert torch.autograd.grad(direct.sum(), conv.weight)[0].abs().sum() > 0


def test_what_trains_may_change_between_calls():
    conv = nn.Conv2d(3, 4, 3)
    use_lean(conv)
    images = torch.randn(2, 3, 9, 9, requires_grad=True)
    for train in (True, False, True):
        conv.weight.requires_grad_(train).grad = None
        conv(images).sum().backward()
        assert (conv.weight.grad is not None) == train


def test_frozen_between_the_passes_it_still_goes_through():
    conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
    use_lean(conv)
    images = torch.randn(2, 3, 9, 9, requires_grad=True)
    output = conv(images)
    conv.requires_grad_(True)
    output.sum().backward()
    assert images.grad is not None and conv.weight.grad is None


def test_a_second_derivative_is_refused():
    conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
    use_lean(conv)
    images = torch.randn(2, 3, 9, 9, requires_grad=True)
    (gradient,) = torch.autograd.grad(conv(images).square().sum(), images, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((1, 4, 5, 5), (4, 1, 20, 4)), ((1, 4, 5, 5), (1, 25, 5, 1)), ((2, 4, 5, 5), (200, 50, 10, 2)),
        ((2, 4, 5, 1), (20, 5, 1, 9)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kernel", [1, 3])
def test_maps_whose_strides_kernels_do_not_take(assert_as_stock, size, stride, kernel):
    """An addition gives a single sample in channels_last a stride of 4 along the batch."""
    layer = nn.Conv2d(4, 6, kernel, padding=kernel // 2, dtype=torch.float64).requires_grad_(False)
    lean, stock = copy.deepcopy(layer), layer
    use_lean(lean)
    found = []
    for each in (lean, stock):
        leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
        values = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * leaf
        output = each(values.as_strided(size, stride))
        output.square().sum().backward()
        found.append((output.detach(), leaf.grad))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
