"""Kept feature maps in 8 and 4 bits: error bound, mean and gradients against float64, and what is kept how often."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn
from torch.nn import functional as F

from snugfit.lean import CompressedActivations, use_lean
from snugfit.lean.compression import BLOCK, SMALLEST, decode, encode
from snugfit.memory.tensors import LiveBytes, tensor_peak_bytes

BITS = pytest.mark.parametrize("bits", [8, 4])
GROUP_BYTES = {8: BLOCK + 8, 4: BLOCK // 2 + 8}
SLACK = 1 + 1e-5
"""For rounding in float32."""


def restored(values, bits):
    found = torch.empty_like(values)
    decode(encode(values, bits), found)
    return found


def bounds(values, bits):
    """The docstring's bound for each of (N,) values, in float64."""
    groups = values.double().split(BLOCK)
    gaps = [(group.max() - group.min()).expand(len(group)) / (2**bits - 1) for group in groups if len(group)]
    return torch.cat([*gaps, torch.zeros(0, dtype=torch.float64)])


@BITS
@given(
    arrays("float32", st.integers(0, 600), elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False)),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_the_error_is_within_the_bound_of_the_docstring(bits, drawn, seed):
    torch.manual_seed(seed)
    values = torch.from_numpy(drawn)
    error = (restored(values, bits).double() - values).abs()
    assert (error <= bounds(values, bits) * SLACK + 2**-23 * values.double().abs() * 2 + 1e-36).all()


@BITS
def test_every_row_of_a_long_tensor_is_within_the_bound(bits):
    torch.manual_seed(0)
    values = torch.randn(250 * BLOCK + 100) * torch.exp(3 * torch.randn(250 * BLOCK + 100))
    error = (restored(values, bits).double() - values).abs()
    assert (error <= bounds(values, bits) * SLACK + 1e-6 * values.abs()).all()
    assert error.max() > 0


@BITS
def test_the_mean_over_many_draws_is_the_value(bits):
    torch.manual_seed(0)
    group = torch.randn(BLOCK)
    draws = 4000
    found = restored(group.repeat(draws), bits).double().view(draws, BLOCK)
    gap = bounds(group, bits)
    assert ((found.mean(0) - group).abs() <= gap * (5 * 0.5 / draws**0.5)).all()  # five standard errors
    assert (found.std(0) > 0).float().mean() > 0.9


def test_errors_far_apart_are_not_correlated():
    """Noise is used again, shifted: without the shift, the products below would all be positive."""
    torch.manual_seed(0)
    half = torch.full((BLOCK,), 0.5)
    half[0], half[1] = 0.0, 255.0
    values, draws = half.repeat(2 * 240), 300
    errors = [(restored(values, 8) - values).view(2, -1) for _ in range(draws)]
    products = torch.tensor([4 * (first * second).mean().item() for first, second in errors])
    assert products.mean().abs() < 5 * 0.6 / draws**0.5
    assert products.std() > 0.1  # one shift decides for a whole piece


@BITS
@pytest.mark.parametrize("value", [0.0, -3.7, 1e30])
def test_constant_groups_are_exact(bits, value):
    values = torch.full((BLOCK + 7,), value)
    assert torch.equal(restored(values, bits), values)


@BITS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_stay_in_their_group(bits, bad):
    torch.manual_seed(0)
    values = torch.randn(3 * BLOCK)
    values[300] = bad
    found = restored(values, bits)
    assert not found[BLOCK : 2 * BLOCK].isfinite().all()
    assert found[:BLOCK].isfinite().all() and found[2 * BLOCK :].isfinite().all()


@BITS
def test_zeros_of_a_relu_stay_zero(bits):
    values = torch.randn(1000).relu()
    assert (restored(values, bits)[values == 0] == 0).all()


def block(width=16):
    """Convolution, norm and ReLU, twice; the second convolution's input is read by the classifier's norm too."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width * 64, 5))


def gradients(network, images, bits=None, seed=0):
    network = copy.deepcopy(network)
    use_lean(network)
    torch.manual_seed(seed)
    if bits is None:
        outputs = network(images)
    else:
        with CompressedActivations(bits):
            outputs = network(images)
    F.cross_entropy(outputs, torch.arange(len(images)) % 5).backward()
    return {name: parameter.grad for name, parameter in network.named_parameters()}


def images_of(order, batch=16):
    torch.manual_seed(1)
    images = torch.randn(batch, 3, 8, 8)
    if order == "sliced":
        return torch.randn(batch, 3, 8, 16)[..., ::2]
    return images.contiguous(memory_format=order)


@BITS
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last, "sliced"])
def test_gradients_are_those_of_float64_on_average(bits, order):
    images, draws = images_of(order), 60
    want = gradients(block().double(), images.double())
    found = [gradients(block(), images, bits, seed) for seed in range(draws)]
    for name, exact in want.items():
        each = torch.stack([drawn[name].double() for drawn in found])
        error = each.std(0) / draws**0.5
        # five standard errors, the rounding of float32, and BatchNorm's bias of the first layers
        allowed = 5 * error + 1e-5 + (0.02 if bits == 4 else 1e-3) * exact.abs().max()
        assert ((each.mean(0) - exact).abs() <= allowed).all(), name


@BITS
def test_a_weight_gradient_is_within_the_bound_of_its_input(bits):
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 1, bias=False)
    source, upper = torch.randn(4, 8, 16, 16), torch.randn(4, 8, 16, 16)
    scale = torch.ones(1, 8, 1, 1, requires_grad=True)
    with CompressedActivations(bits):
        output = layer(source * scale)
    output.backward(upper)
    gap = bounds(source.view(-1), bits).view_as(source)
    want = torch.einsum("bkhw,bchw->kc", upper.double(), source.double())
    allowed = torch.einsum("bkhw,bchw->kc", upper.double().abs(), gap)
    assert ((layer.weight.grad.double()[..., 0, 0] - want).abs() <= allowed * SLACK + 1e-4).all()
    assert not torch.equal(layer.weight.grad.double()[..., 0, 0], want)
    exact = torch.einsum("bkhw,kc,bchw->c", upper, layer.weight[..., 0, 0], source)
    torch.testing.assert_close(scale.grad.view(-1), exact, rtol=1e-4, atol=1e-3)  # weights and images are exact


@BITS
def test_rounding_follows_from_the_seed(bits):
    images = images_of(torch.channels_last)
    first, same, other = (gradients(block(), images, bits, seed)["0.weight"] for seed in (3, 3, 4))
    assert torch.equal(first, same) and not torch.equal(first, other)


weight = torch.randn(1, 4096, requires_grad=True)


def held_after(forward):
    """Bytes of the tensors that were made by a forward pass and are still there, without its result."""
    with LiveBytes([weight]) as counter:
        outputs = forward()
        return counter.live - weight.nbytes - outputs.untyped_storage().nbytes()


@BITS
def test_a_norm_keeps_one_compressed_tensor_and_readers_share_it(bits):
    source = torch.randn(4, 16, 16, 16, requires_grad=True)
    norm, readers = nn.BatchNorm2d(16), [nn.Conv2d(16, 1, 1) for _ in range(2)]
    groups = source.numel() // BLOCK

    def forward(use):
        with CompressedActivations(bits):
            return use(source * 1)

    one = held_after(lambda: forward(norm))
    assert groups * GROUP_BYTES[bits] <= one <= groups * GROUP_BYTES[bits] + 1000
    two = held_after(lambda: forward(lambda maps: readers[0](maps) + readers[1](maps)))
    assert groups * GROUP_BYTES[bits] <= two <= groups * GROUP_BYTES[bits] + 1000
    views = held_after(lambda: forward(lambda maps: readers[0](maps).sum() + F.linear(maps.flatten(1), weight).sum()))
    assert groups * GROUP_BYTES[bits] <= views <= groups * GROUP_BYTES[bits] + 5000


def test_a_tensor_that_changes_in_between_is_stored_twice():
    source = torch.randn(4, 16, 16, 16, requires_grad=True)
    readers = [nn.Conv2d(16, 1, 1, bias=False) for _ in range(2)]
    with CompressedActivations(8):
        maps = source * 1
        first = readers[0](maps)
        second = readers[1](maps.mul_(2))
    (first + second).sum().backward()
    sums = [reader.weight.grad.view(-1) for reader in readers]
    torch.testing.assert_close(sums[1], 2 * sums[0], rtol=0, atol=4.0)
    torch.testing.assert_close(sums[0], source.detach().sum((0, 2, 3)), rtol=0, atol=4.0)


def test_small_tensors_weights_and_other_types_stay_exact():
    torch.manual_seed(0)
    wide = nn.Linear(8, 1024)  # its transposed weight is kept for the gradient of the input
    inner = nn.Linear(4, 8)
    with CompressedActivations(4):
        output = wide(inner(torch.ones(2, 4)))
    output.square().mean().backward()
    found = inner.weight.grad.clone()
    inner.weight.grad = None
    wide(inner(torch.ones(2, 4))).square().mean().backward()
    assert torch.equal(found, inner.weight.grad)
    assert wide.weight.numel() >= SMALLEST


@BITS
def test_lowered_feature_maps_are_compressed_and_lowered_weights_are_not(bits):
    torch.manual_seed(0)
    first, second = nn.Linear(64, 256), nn.Linear(256, 256)
    images = torch.randn(32, 64)
    found = []
    for context in (CompressedActivations(bits), None):
        with torch.autocast("cpu", torch.bfloat16):
            if context is None:
                output = second(first(images))
            else:
                with context:
                    output = second(first(images))
        output.sum().backward()
        found.append([layer.weight.grad.clone() for layer in (first, second)])
        first.weight.grad = second.weight.grad = None
    (compressed, rounded), (exact, precise) = found
    assert torch.equal(compressed, exact)
    assert not torch.equal(rounded, precise)
    torch.testing.assert_close(rounded, precise, rtol=0, atol=32**0.5)


@BITS
def test_the_meta_device_counts_the_same_bytes(bits):
    def peak(device):
        network = block(32).to(device)
        use_lean(network)
        images = torch.zeros(16, 3, 8, 8, device=device)

        def step():
            with CompressedActivations(bits):
                loss = network(images).sum()
            loss.backward()

        return tensor_peak_bytes(step, [network])

    on_meta, on_cpu = peak("meta"), peak("cpu")
    assert 0.97 * on_cpu <= on_meta <= 1.1 * on_cpu


def test_a_batch_without_images_is_accepted():
    with CompressedActivations(8):
        output = nn.Conv2d(3, 4, 3)(torch.zeros(0, 3, 8, 8, requires_grad=True) * 1)
    output.sum().backward()
