"""What every unit of a chain takes in a step: bytes on the meta device, seconds as estimated."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from snugfit._chain import Chain, Unit
from snugfit._core.profile import UnitFacts
from snugfit.lean import use_lean_convolutions
from snugfit.memory.tensors import LiveBytes
from snugfit.strategies.checkpoint.dynamic_program import Stage

MACS_PER_BYTE = 5.0
"""Multiply-accumulates that take as long as writing and reading a byte of a map. Times steer which schedules are
measured, and measured ones decide."""
BACKWARD = 3.0
"""Seconds of a unit's backward pass over those of its forward pass: 2.3 to 5 on a processor (VGG-16, ResNet-18)."""
TYPICAL_SPEED = 50e9
"""Multiply-accumulates in a second; only ratios of times matter here."""


def stages_of(chain: Chain, facts: Sequence[UnitFacts], batch: int) -> list[Stage]:
    """What each unit takes at a batch size, with the gradients of its own weights while they are applied.

    Args:
        chain: the chain, on the meta device.
        facts: of its units.
        batch: images at once.

    Raises:
        ValueError: a unit cannot train on so few images (BatchNorm on 1x1 maps).
    """
    return [_stage(unit, fact, batch, first=index == 0) for index, (unit, fact) in enumerate(_pairs(chain, facts))]


def _pairs(chain: Chain, facts: Sequence[UnitFacts]) -> list[tuple[Unit, UnitFacts]]:
    return list(zip(copy.deepcopy(chain).all_units, facts, strict=True))


def _stage(unit: Unit, facts: UnitFacts, batch: int, *, first: bool) -> Stage:
    module = unit.module.train()
    use_lean_convolutions(module)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_free)
    inputs = torch.empty((batch, *unit.input_shape), device="meta", requires_grad=not first)
    counter = LiveBytes()
    for tensor in (inputs, *module.parameters(), *module.buffers()):
        counter.add(tensor)
    before = counter.live
    with counter:
        with torch.no_grad():
            output = module(inputs).nbytes
        passing, counter.peak = counter.peak - before, before
        saved, saving, returning = _step(module, inputs, counter, before)
    seconds = batch * (facts.macs + MACS_PER_BYTE * (facts.saved_bytes + facts.output_bytes)) / TYPICAL_SPEED
    return Stage(seconds, BACKWARD * seconds, output, saved, passing, saving, returning)


def _step(module: nn.Module, inputs: Tensor, counter: LiveBytes, before: int) -> tuple[int, int, int]:
    """Bytes that are kept after the forward pass, and the most in it and in the backward pass."""
    outputs = module(inputs)
    saved, saving = counter.live - before, counter.peak - before
    if not outputs.requires_grad:
        return saved, saving, saved
    root = (outputs * 1).sum()  # whose backward pass makes a whole gradient, which autograd frees when it is passed on
    del outputs
    counter.peak = counter.live
    root.backward()
    return saved, saving, counter.peak - before


def _free(parameter: Tensor) -> None:
    parameter.grad = None
