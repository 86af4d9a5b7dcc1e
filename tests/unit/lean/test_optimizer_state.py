"""Optimizer state in 8 and 16 bits: rounding against brute force in float64, updates against the float rules."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from snugfit.lean import optimizer_state
from snugfit.lean.optimizer_state import BLOCK, PIECE, RoundingRule, dequantise, quantise, round_to_bfloat16
from snugfit.lean.update_rules import FusedAdamW, FusedSGD
from snugfit.memory.tensors import tensor_peak_bytes

SGD, ADAMW = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")
SIGNED = [((abs(code) / 127) ** 2) * (1 if code >= 0 else -1) for code in range(-127, 128)]
UNSIGNED = [(code / 255) ** 4 for code in range(256)]
"""Values of all codes, as shares of the scale, in ascending order."""
SLACK = 1e-4
"""Of a gap between two code values, for rounding in float32."""


def neighbours(value, scale, signed):
    """The largest code value not above ``value``, and the next one, found by trying all."""
    table = [scale * share for share in (SIGNED if signed else UNSIGNED)]
    below = max((each for each in table if each <= value), default=table[0])
    return below, min((each for each in table if each > below), default=below)


def oracle(values, noise, signed):
    """Values after rounding, in float64: away from zero if the noise is below the share of the way."""
    rounded = []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK].double().tolist()
        scale = max(abs(each) for each in block)
        for value, chance in zip(block, noise[start : start + BLOCK].tolist(), strict=True):
            low, high = neighbours(abs(value), scale, signed)
            if not signed and value and low == 0.0:
                low = high
            up = high > low and chance < (abs(value) - low) / (high - low)
            rounded.append((high if up else low) * (-1 if value < 0 else 1))
    return torch.tensor(rounded, dtype=torch.float64)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("count", [1, 255, 256, 700])
def test_rounding_is_that_of_brute_force(signed, count):
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator) * torch.exp(2 * torch.randn(count, generator=generator))
    values = values if signed else values.square()
    noise = torch.rand(count, generator=generator)
    codes, scales = quantise(values, noise, signed=signed)
    assert codes.dtype == (torch.int8 if signed else torch.uint8) and codes.shape == values.shape
    assert scales.shape == (-(-count // BLOCK),)
    found, want = dequantise(codes, scales).double(), oracle(values, noise, signed)
    close = torch.isclose(found, want, rtol=1e-4, atol=0)
    assert close.float().mean() > 0.995  # a chance that equals the noise to 1e-4 may fall either way
    assert torch.equal(found.sign(), want.sign())


@pytest.mark.parametrize("signed", [True, False])
@given(
    arrays("float32", st.integers(1, 300), elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False)),
    st.floats(0, 1, width=32, exclude_max=True),
)
@settings(max_examples=60, deadline=None)
def test_the_error_is_within_the_bound_of_the_docstring(signed, drawn, chance):
    values = torch.from_numpy(drawn) if signed else torch.from_numpy(drawn).abs()
    codes, scales = quantise(values, torch.full_like(values, chance), signed=signed)
    found = dequantise(codes, scales).double()
    scale = scales.double().repeat_interleave(BLOCK)[: len(values)]
    share = (values.double().abs() / scale).nan_to_num()
    gap = (share.sqrt() + 1 / 127) ** 2 - share if signed else (share**0.25 + 1 / 255) ** 4 - share
    assert ((found - values).abs() <= scale * gap * (1 + SLACK) + 1e-37).all()
    assert (found[values == 0] == 0).all()
    assert (found.abs() == scale)[values.abs() == scale].all()
    if not signed:
        assert (found[(values > 0) & (scale > 1e-20)] > 0).all()


@pytest.mark.parametrize("signed", [True, False])
def test_the_mean_over_the_noise_is_the_value(signed):
    torch.manual_seed(0)
    values = torch.linspace(-1 if signed else 1e-6, 1, BLOCK)
    noise = ((torch.arange(4000) + 0.5) / 4000).repeat_interleave(BLOCK)
    codes, scales = quantise(values.repeat(4000), noise, signed=signed)
    mean = dequantise(codes, scales).double().view(4000, BLOCK).mean(0)
    torch.testing.assert_close(mean, values.double(), rtol=1e-4, atol=1e-5 if signed else 1e-9)


def test_bfloat16_rounds_to_a_neighbour_with_the_right_mean():
    torch.manual_seed(0)
    values = torch.cat([torch.randn(50) * torch.exp(5 * torch.randn(50)), torch.tensor([0.0, 1.0, -2.0])])
    noise = ((torch.arange(2**16) + 0.5) / 2**16).repeat_interleave(len(values))
    found = round_to_bfloat16(values.repeat(2**16), noise).double().view(2**16, -1)
    torch.testing.assert_close(found.mean(0), values.double(), rtol=1e-6, atol=0)
    assert (found.amax(0) - found.amin(0) <= 2**-7 * values.double().abs()).all()
    assert (found[:, -3:] == values[-3:].double()).all()


@given(
    arrays("float32", st.integers(1, 50), elements=st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False)),
    st.floats(0, 1, width=32, exclude_max=True),
)
@settings(max_examples=100, deadline=None)
def test_bfloat16_rounds_to_one_of_both_neighbours(drawn, chance):
    """Brute force: bfloat16 numbers are float32 numbers whose lower 16 bits are zero."""
    values = torch.from_numpy(drawn)
    found = round_to_bfloat16(values, torch.full_like(values, chance)).double()
    toward_zero = (values.view(torch.int32) & -(2**16)).view(torch.float32)
    away = ((values.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    is_exact = values == toward_zero
    assert torch.where(is_exact, found == toward_zero, (found == toward_zero) | (found == away)).all()
    spacing = away.double() - toward_zero.double()
    share = (values.double() - toward_zero) / spacing
    up, down = share > 1 - chance + 2**-16, share < 1 - chance - 2**-16
    assert (found[up] == away[up]).all() and (found[down] == toward_zero[down]).all()


def test_bfloat16_keeps_infinities_and_nan():
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int64).to(torch.int32)
    for chance in (0.0, 0.999):
        assert round_to_bfloat16(bits.view(torch.float32), torch.full((4,), chance)).isnan().all()
        infinite = torch.tensor([float("inf"), float("-inf")])
        assert torch.equal(round_to_bfloat16(infinite, torch.full((2,), chance)).float(), infinite)


def rule(kind, adam=False, lr=0.1, decay=1e-2, seed=0):
    inner = FusedAdamW(lr, decay) if adam else FusedSGD(lr, 0.9, decay)
    return RoundingRule(inner, kind, seed)


def stepped(rule, parameter, steps, first=0):
    for step in range(first, first + steps):
        parameter.grad = gradient_of(parameter, step)
        rule.step(parameter)
    return parameter


def gradient_of(parameter, step):
    torch.manual_seed(step)
    return torch.empty_like(parameter).copy_(torch.randn(parameter.shape))


def weight(*shape):
    torch.manual_seed(99)
    made = torch.randn(shape)
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 else made


@pytest.mark.parametrize("shape", [(3,), (257,), (40, 30, 3, 3), (130, 150)])
@pytest.mark.parametrize("adam", [False, True])
def test_the_first_step_is_the_float_rule_bit_for_bit(adam, shape):
    """Nothing was rounded yet; pieces of the parameter are updated as the whole."""
    float_rule = FusedAdamW(0.1, 1e-2) if adam else FusedSGD(0.1, 0.9, 1e-2)
    want = stepped(float_rule, weight(*shape), 1)
    for kind in ("int8", "bfloat16"):
        assert torch.equal(stepped(rule(kind, adam), weight(*shape), 1), want)


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize(("kind", "error"), [("int8", 0.05), ("bfloat16", 0.02)])
def test_many_steps_stay_close_to_the_float_rule(adam, kind, error):
    float_rule = FusedAdamW(0.01, 0.0) if adam else FusedSGD(0.01, 0.9, 0.0)
    want = stepped(float_rule, weight(40, 30, 3, 3), 50)
    moved = (want - weight(40, 30, 3, 3)).square().mean().sqrt()
    found = stepped(rule(kind, adam, 0.01, 0.0), weight(40, 30, 3, 3), 50)
    assert (found - want).square().mean().sqrt() < error * moved


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_a_second_moment_follows_small_changes_only_by_stochastic_rounding(kind, monkeypatch):
    """It falls by a thousandth a step while gradients are small: by e^-1 in 1,000 steps."""

    def second_moment():
        made, parameter = rule(kind, adam=True, lr=0.0), torch.zeros(8 * BLOCK)
        for step in range(1001):
            parameter.grad = torch.full((8 * BLOCK,), 1.0 if step == 0 else 0.0)
            parameter.grad[::BLOCK] = 1.0  # it keeps the block's scale
            made.step(parameter)
        value = made.state["exp_avg_sq"]
        value = dequantise(value, made.state["exp_avg_sq_scale"]) if kind == "int8" else value.float()
        return value.view(-1, BLOCK)[:, 1:].mean().item() / 1e-3

    assert second_moment() == pytest.approx(0.3677, rel=0.05)
    monkeypatch.setattr(optimizer_state.torch, "rand", lambda count, **_: torch.full((count,), 0.5))
    assert second_moment() > 0.9


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
@pytest.mark.parametrize("adam", [False, True])
def test_a_copied_state_continues_to_the_bit_and_rounding_depends_on_seed_and_step(kind, adam):
    whole = stepped(rule(kind, adam), weight(70, 300), 4)
    first = rule(kind, adam)
    part = stepped(first, weight(70, 300), 2)
    resumed = rule(kind, adam)
    resumed.state = {name: value.clone() for name, value in first.state.items()}
    assert torch.equal(stepped(resumed, part, 2, first=2), whole)
    assert not torch.equal(stepped(rule(kind, adam, seed=1), weight(70, 300), 4), whole)


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize(("kind", "each"), [("int8", 1 + 4 / BLOCK), ("bfloat16", 2)])
def test_bytes_of_state_and_of_a_step(kind, each, adam):
    count = 20 * PIECE
    made, parameter = rule(kind, adam), nn.Parameter(weight(20, PIECE))
    stepped(made, parameter, 1)
    assert sum(value.nbytes for value in made.state.values()) == count * each * (2 if adam else 1) + 4
    parameter.grad = gradient_of(parameter, 1)
    held = [parameter, parameter.grad, *made.state.values()]
    resting = sum(each.nbytes for each in held)
    peak = tensor_peak_bytes(lambda: made.step(parameter), held)
    assert 0 < peak - resting <= optimizer_state.TEMPORARIES * 4 * PIECE


def test_the_meta_device_has_the_same_state():
    real, meta = weight(40, 30, 3, 3), torch.empty(40, 30, 3, 3, device="meta").to(memory_format=torch.channels_last)
    for kind in ("int8", "bfloat16"):
        for adam in (False, True):
            on_meta, on_cpu = rule(kind, adam), rule(kind, adam)
            meta.grad = torch.empty_like(meta)
            on_meta.step(meta)
            stepped(on_cpu, real, 1)
            facts = [{n: (v.shape, v.stride(), v.dtype) for n, v in each.state.items()} for each in (on_meta, on_cpu)]
            assert facts[0] == facts[1]


def stored(parameter):
    made = parameter.bfloat16()
    made.grad_dtype = torch.float32
    return made


def float_gradient_of(parameter, step):
    torch.manual_seed(step)
    return torch.empty_like(parameter, dtype=torch.float32).copy_(torch.randn(parameter.shape))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("shape", [(3,), (40, 30, 3, 3), (130, 150)])
def test_a_step_of_bfloat16_weights_is_the_float64_step_within_a_spacing(kind, adam, shape):
    start = stored(weight(*shape))
    want = start.double()
    want.grad = float_gradient_of(start, 0).double()
    stock = torch.optim.AdamW([want], 0.1, weight_decay=1e-2) if adam else torch.optim.SGD([want], 0.1, 0.9)
    stock.step()
    made, found = rule(kind, adam, decay=1e-2 if adam else 0.0), start.clone(memory_format=torch.preserve_format)
    found.grad_dtype = torch.float32
    found.grad = float_gradient_of(found, 0)
    made.step(found)
    assert found.dtype == torch.bfloat16 and found.stride() == start.stride()
    assert ((found.double() - want).abs() <= 2**-7 * want.abs() + 1e-6).all()
    assert not torch.equal(found, start)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_updates_far_below_the_spacing_are_not_lost(kind):
    """1,000 steps of 1e-5 at 1.0, where bfloat16 numbers are 2^-7 apart; to nearest nothing would move."""
    made, parameter = RoundingRule(FusedSGD(1e-5), kind), stored(torch.ones(PIECE))
    for _ in range(1000):
        parameter.grad = torch.full((PIECE,), -1.0)
        made.step(parameter)
    assert parameter.float().mean().item() == pytest.approx(1.01, abs=1e-3)
    assert set(parameter.float().unique().tolist()) <= {1.0 + index * 2**-7 for index in range(8)}


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("adam", [False, True])
def test_bfloat16_weights_continue_to_the_bit(kind, adam):
    def run(made, parameter, steps):
        for step in steps:
            parameter.grad = float_gradient_of(parameter, step)
            made.step(parameter)
        return parameter

    whole = run(rule(kind, adam), stored(weight(70, 300)), range(4))
    first = rule(kind, adam)
    part = run(first, stored(weight(70, 300)), range(2))
    resumed = rule(kind, adam)
    resumed.state = {name: value.clone() for name, value in first.state.items()}
    assert torch.equal(run(resumed, part, range(2, 4)), whole)
    assert not torch.equal(run(rule(kind, adam, seed=1), stored(weight(70, 300)), range(4)), whole)


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("adam", [False, True])
def test_bytes_of_a_step_with_bfloat16_weights(kind, adam):
    made, parameter = rule(kind, adam), stored(weight(20, PIECE))
    for step in range(2):
        parameter.grad = float_gradient_of(parameter, step)
        held = [parameter, parameter.grad, *made.state.values()]
        resting = sum(each.nbytes for each in held)
        peak = tensor_peak_bytes(lambda: made.step(parameter), held)
    assert 0 < peak - resting <= optimizer_state.TEMPORARIES * 4 * PIECE


def test_values_that_are_not_finite_stay_so():
    made, parameter = rule("int8"), stored(torch.ones(300))
    parameter.grad = torch.ones(300)
    parameter.grad[:2] = torch.tensor([float("nan"), float("inf")])
    made.step(parameter)
    assert not parameter[:2].isfinite().any() and parameter[300 - 1].isfinite()
