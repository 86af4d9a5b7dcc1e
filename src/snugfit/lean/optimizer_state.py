"""Optimizer state in 8 or 16 bits, weights in 16: quantisation, and update rules that work on pieces of a parameter.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization (ICLR 2022): each block of consecutive values has a scale,
its largest absolute value. Instead of the paper's dynamic tree, codes are roots: a momentum is the signed square of its
code, a second moment the fourth power. They need no table, and their error is smaller. Rounded to nearest, a normal
momentum has a relative root mean square error of 0.7 % (tree 2.2 %, even spacing 0.7 %), one with lognormal scales
0.9 % (2.6 %, 2.0 %). Of the squares of the latter 0.03 % are below the smallest code (1.1 %, 59 %).

All rounding is stochastic. Rounding to nearest loses changes below half the distance of two codes: second moments
decay by a thousandth per step, and stayed at 1.0 where they should have fallen to 0.37. Stochastic rounding keeps the
mean. As the state is linear in the gradients and their squares, its expectation is that of the float state, given the
gradients. The random numbers follow from a seed and the step, so that a resumed run rounds like an uninterrupted one.

Weights in bfloat16 are updated in float32 and rounded stochastically too (Gupta et al., Deep Learning with Limited
Numerical Precision, ICML 2015; Zamirai et al., Revisiting BFloat16 Training, 2020). Rounding to nearest would lose
every update below half a spacing, which is 0.2 to 0.4 % of the weight.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from torch import Tensor

from snugfit.lean.update_rules import PART_MULTIPLE, FusedRule, WrappingRule, fit_gradient, values_in_memory

StateType = Literal["float32", "bfloat16", "int8"]
Number = TypeVar("Number", float, Tensor)
BLOCK = PART_MULTIPLE
"""Values that share a scale."""
PIECE = 60 * BLOCK
"""Values of a parameter that are updated at once. A float temporary of them is just too small to be mapped by malloc
(64 KiB), which would cost page faults in every operation."""
TEMPORARIES = 12
"""Most float temporaries of a piece during a step, rounded up."""
SCALE_SUFFIX = "_scale"
"""After the name of a state in 8 bits, the name of its scales."""
_SIGNED_TOP, _UNSIGNED_TOP = 127.0, 255.0
"""Largest codes."""
_SMALLEST = torch.finfo(torch.float32).tiny
_MIXER = 0x9E3779B1
"""An odd factor that spreads seeds, so that steps of one are not those of another."""
_LOW_BITS = 16
"""Bits that bfloat16 drops of a float32."""


def quantise(values: Tensor, noise: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Round values (N,), float32, to 8-bit codes with a scale per block of 256.

    With s the largest absolute value of the block and r = abs(x) / s, the decoded value is one of the two code values
    around x, up to rounding in float32. These are at most s ((sqrt(r) + 1/127)^2 - r) apart if ``signed``, else at most
    s ((r^(1/4) + 1/255)^4 - r): 1.6 % of s for the largest values, and less for smaller ones. The expectation over the
    noise is x. Exception: an unsigned value between 0 and s / 255^4 becomes s / 255^4, so that no step of AdamW divides
    by nearly zero.

    Args:
        values: not negative unless ``signed``.
        noise: uniform random numbers in [0, 1), (N,).
        signed: square codes from -127 to 127, else fourth-power codes from 0 to 255.

    Returns:
        Codes (N,), int8 if signed, else uint8; scales (ceil(N / 256),), float32.
    """
    top = _SIGNED_TOP if signed else _UNSIGNED_TOP
    blocks, chances = _blocks(values), _blocks(noise)
    powers = blocks.abs()  # of codes: from here on in units of the smallest code's value
    scales = powers.amax(1)
    powers.div_(scales.clamp_min(_SMALLEST).unsqueeze(1)).mul_(_power(top, signed=signed))
    codes = powers.sqrt() if signed else powers.sqrt().sqrt_()
    codes.floor_().clamp_(max=top - 1)
    if not signed:
        torch.maximum(codes, powers.sign(), out=codes)
    below = _power(codes, signed=signed)
    gaps = _power(codes + 1, signed=signed).sub_(below)
    codes += chances * gaps < powers.sub_(below)
    if signed:
        codes.copysign_(blocks)
    return codes.to(torch.int8 if signed else torch.uint8).view(-1)[: len(values)], scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """Values (N,), float32, of codes (N,) and scales (ceil(N / 256),) from :func:`quantise`."""
    signed = codes.dtype == torch.int8
    values = _blocks(codes.float()).div_(_SIGNED_TOP if signed else _UNSIGNED_TOP)
    values = values * values.abs() if signed else values.square_().square_()
    return values.mul_(scales.unsqueeze(1)).view(-1)[: len(codes)]


def round_to_bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 values (N,) to one of the two bfloat16 neighbours, so that the expectation over the noise is x.

    The neighbours are at most 2^-7 of the value apart. ``noise`` (N,) is uniform in [0, 1). Infinities and NaN stay.
    """
    bits = values.view(torch.int32) + noise.mul(2**_LOW_BITS).to(torch.int32)
    rounded = bits.bitwise_and_(-(2**_LOW_BITS)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _power(codes: Number, *, signed: bool) -> Number:
    squares = codes * codes
    return squares if signed else squares * squares


def _blocks(values: Tensor) -> Tensor:
    """Values (N,) as blocks (ceil(N / 256), 256), the last one padded by zeros."""
    missing = -len(values) % BLOCK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


class RoundingRule(WrappingRule):
    """An update rule whose state is kept in another type between two steps; weights in bfloat16 stay in bfloat16.

    A step works on one piece of the parameter after the other: it restores the piece's state, and weights in bfloat16,
    in float32, lets the rule update the piece, and rounds the new state and weights. So a step never holds the whole
    state, or all weights, in float32. All tensors of ``state`` have the parameter's shape and layout, except the scales
    of :func:`quantise` (one for 256 values in the order of memory) and ``step``.

    Args:
        rule: the rule in float32; its own state stays empty. Of the tensors in it, ``exp_avg_sq`` is never negative.
        kind: type of the state.
        seed: of the rounding, together with the number of the step.
    """

    def __init__(self, rule: FusedRule, kind: StateType, seed: int = 0) -> None:
        super().__init__(rule)
        self._names, self._kind, self._seed = rule.names, kind, seed
        self.state: dict[str, Tensor] = {}
        self._noise: torch.Generator | None = None

    @torch.no_grad()
    def step(self, parameter: Tensor) -> None:
        """Apply the gradient of a parameter of any shape, dense in memory; on the meta device only make tensors."""
        gradient = fit_gradient(parameter)
        self.begin(parameter)
        self.step_part(parameter, values_in_memory(gradient), 0)

    def begin(self, parameter: Tensor) -> None:
        """Make the state of a parameter of any shape, if there is none yet, and the step's random numbers."""
        if not self.state:
            self._make_state(parameter)
        if not parameter.is_meta:
            self.state["step"] += 1
            mixed = (self._seed * _MIXER + int(self.state["step"])) % 2**32  # the generator ignores further bits
            self._noise = torch.Generator(parameter.device).manual_seed(mixed)

    @torch.no_grad()
    def step_part(self, parameter: Tensor, gradient: Tensor, first: int) -> None:
        """See :meth:`PartialRule.step_part`: a parameter of any shape, and the gradient (N,)."""
        if parameter.is_meta:
            torch.empty(TEMPORARIES * min(len(gradient), PIECE), device="meta")
            return
        weights = values_in_memory(parameter)
        kept = {name: values_in_memory(self.state[name]) for name in self._names}
        for start in range(0, len(gradient), PIECE):
            self._step_piece(weights, gradient[start : start + PIECE], kept, first + start)
        self._rule.state = {}
        if first + len(gradient) == len(weights):
            self._noise = None  # it takes 2 kB

    def _step_piece(self, weights: Tensor, gradient: Tensor, kept: dict[str, Tensor], first: int) -> None:
        """Update weights and state, (M,) each, from ``first`` on, by the gradient (N,) of as many."""
        piece = slice(first, first + len(gradient))
        part = weights[piece].float()  # a view if it is float32
        part.grad = gradient.float()
        self._rule.state = {name: self._restored(name, values[piece], first) for name, values in kept.items()}
        self._rule.state["step"] = self.state["step"] - 1
        self._rule.step(part)
        for name, values in kept.items() if self._kind != "float32" else ():
            self._keep(name, values[piece], first, self._random(part))
        if weights.dtype == torch.bfloat16:
            weights[piece] = round_to_bfloat16(part, self._random(part))

    def _random(self, part: Tensor) -> Tensor:
        """Uniform random numbers for a piece, (N,)."""
        return torch.rand(len(part), generator=self._noise, device=part.device)

    def _make_state(self, parameter: Tensor) -> None:
        where = parameter.device
        self.state["step"] = torch.zeros((), device=where)
        for name in self._names:
            self.state[name] = torch.zeros_like(parameter, dtype=self._dtype(name), requires_grad=False)
            if self._kind == "int8":
                self.state[name + SCALE_SUFFIX] = torch.zeros(scale_count(parameter.numel()), device=where)

    def _dtype(self, name: str) -> torch.dtype:
        if self._kind == "int8":
            return torch.int8 if _is_signed(name) else torch.uint8
        return torch.bfloat16 if self._kind == "bfloat16" else torch.float32

    def _restored(self, name: str, values: Tensor, first: int) -> Tensor:
        return dequantise(values, self._scales(name, first, len(values))) if self._kind == "int8" else values.float()

    def _keep(self, name: str, values: Tensor, first: int, noise: Tensor) -> None:
        """Round a piece of the new state into ``values`` (N,), by ``noise`` (N,)."""
        if self._kind == "int8":
            codes, scales = quantise(self._rule.state[name], noise, signed=_is_signed(name))
            self._scales(name, first, len(values)).copy_(scales)
            values.copy_(codes)
        else:
            values.copy_(round_to_bfloat16(self._rule.state[name], noise))

    def _scales(self, name: str, first: int, count: int) -> Tensor:
        start = first // BLOCK
        return self.state[name + SCALE_SUFFIX][start : start + scale_count(count)]


def scale_count(count: int) -> int:
    """Scales of this many values."""
    return -(-count // BLOCK)


def _is_signed(name: str) -> bool:
    return name != "exp_avg_sq"
