"""Statistics of units without data: parameters, multiply-accumulates, bytes saved for the backward pass."""

from __future__ import annotations

import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from snugfit._chain import Chain, Unit, tracking_norms
from snugfit._core.profile import UnitStats
from snugfit.memory.tensors import saved_bytes


def unit_stats(chain: Chain) -> tuple[UnitStats, ...]:
    """Statistics of every unit of a chain on the meta device, the head last."""
    return tuple(_stats(unit) for unit in chain.all_units)


def _stats(unit: Unit) -> UnitStats:
    inputs = torch.empty((2, *unit.input_shape), device="meta")
    held = [*unit.module.parameters(), *unit.module.buffers()]
    unit.module.train()
    with FlopCounterMode(display=False) as counter:
        saved = saved_bytes(lambda: unit.module(inputs), held)
    return UnitStats(
        name=unit.name,
        parameters=unit.parameters,
        weight_bytes=unit.weight_bytes,
        macs=counter.get_total_flops() // 4,
        output_shape=tuple(unit.output_shape),
        output_bytes=4 * math.prod(unit.output_shape),
        saved_bytes=saved // 2,
        tracks=bool(tracking_norms(unit.module)),
    )
