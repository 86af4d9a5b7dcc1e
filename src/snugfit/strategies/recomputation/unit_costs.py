"""The cost of each unit of a chain in a step: bytes on the meta device, and estimated seconds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit._core.profile import UnitStats
from snugfit.lean import use_lean_convolutions
from snugfit.lean.bfloat16_weights import use_float_gradients
from snugfit.memory.tensors import LiveBytes
from snugfit.strategies.recomputation.dynamic_program import UnitCost
from snugfit.strategies.recomputation.paging import Pager, Paging

MACS_PER_BYTE = 5.0
"""Multiply-accumulates that take as long as writing and reading a byte of a feature map. These times select which
schedules are measured; the measured times decide."""
BACKWARD = 3.0
"""Time of a unit's backward pass over that of its forward pass: 2.3 to 5 on a processor (VGG-16, ResNet-18)."""
TYPICAL_SPEED = 50e9
"""Multiply-accumulates per second; only ratios of times matter here."""


def unit_costs(chain: Chain, stats: Sequence[UnitStats], batch: int, *, paging: Paging | None = None) -> list[UnitCost]:
    """The cost of each unit at a batch size, including the gradients of its own weights while they are applied.

    Args:
        chain: the chain, on the meta device.
        stats: of its units.
        batch: images at once.
        paging: where what units save may go; None if it stays in memory.

    Raises:
        ValueError: a unit cannot train on so few images (BatchNorm on 1x1 feature maps).
    """
    units = copy.deepcopy(chain).all_units
    return [
        module_cost(unit.module, (batch, *unit.input_shape), unit_seconds(own, batch), first=index == 0, paging=paging)
        for index, (unit, own) in enumerate(zip(units, stats, strict=True))
    ]


def unit_seconds(stats: UnitStats, batch: int) -> float:
    """Estimated seconds of a unit's forward pass."""
    return batch * (stats.macs + MACS_PER_BYTE * (stats.saved_bytes + stats.output_bytes)) / TYPICAL_SPEED


def module_cost(
    module: nn.Module, shape: tuple[int, ...], seconds: float, *, first: bool = False, paging: Paging | None = None
) -> UnitCost:
    """The cost of a module of its own, on the meta device, which is changed.

    Args:
        module: maps (B, ...) to one tensor.
        shape: of its input, (B, ...).
        seconds: of its forward pass.
        first: whether its input gets no gradient.
        paging: where what it saves may go; None if it stays in memory.
    """
    module.train()
    use_lean_convolutions(module)
    use_float_gradients(module)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_free_gradient)
    inputs = torch.empty(shape, device="meta", requires_grad=not first)
    counter = LiveBytes()
    for tensor in (inputs, *module.parameters(), *module.buffers()):
        counter.add(tensor)
    before = counter.live
    with counter:
        with torch.no_grad():
            output_bytes = module(inputs).nbytes
        discarding, counter.peak = counter.peak - before, before
        saved_bytes, saving, backward = _step(module, inputs, counter, before)
        cost = UnitCost(seconds, BACKWARD * seconds, output_bytes, saved_bytes, discarding, saving, backward)
        if paging is None:
            return cost
        inputs.grad, counter.peak, pager = None, before, Pager(paging.make(), [module])
        with pager.paging(inputs if first else None):
            kept, saving, backward = _step(module, inputs, counter, before, pager)
    return replace(
        cost,
        paged_bytes=pager.bytes,
        paged_kept_bytes=max(kept - output_bytes, 0),
        paged_saving_peak=saving,
        paged_backward_peak=backward,
        paging_speed=paging.speed,
    )


def _step(
    module: nn.Module, inputs: Tensor, counter: LiveBytes, before: int, pager: Pager | None = None
) -> tuple[int, int, int]:
    """Bytes saved by the forward pass, its peak, and the peak of the backward pass; inputs (batch, *input_shape)."""
    outputs = module(inputs)
    if pager is not None:
        pager.pages.finish()
    saved, saving = counter.live - before, counter.peak - before
    if not outputs.requires_grad:
        return saved, saving, saved
    root = (outputs * 1).sum()  # its backward pass makes a full gradient, which autograd frees once it is passed on
    del outputs
    counter.peak = counter.live
    root.backward()
    return saved, saving, counter.peak - before


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None
