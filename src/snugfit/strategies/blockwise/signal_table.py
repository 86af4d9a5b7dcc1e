"""The table of the learning signal: what each method of training costs in arithmetic, parameters and memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from snugfit._chain import Chain
from snugfit._core.hardware import Hardware
from snugfit._core.registry import strategy_class
from snugfit._core.workload import Workload
from snugfit.local.signal import BACKPROP, learning_signal
from snugfit.profiling import Probe


def signal_table(
    chain: Chain, workload: Workload, hardware: Hardware, local_losses: Iterable[str] | None = None
) -> dict[str, dict[str, int]]:
    """One row for backpropagation and one for each local loss (LLS, Table 3). Nothing is allocated.

    ``peak_bytes`` are the peak tensor bytes of a training step at the workload's batch size and with its optimizer,
    from a run on the meta device: for backpropagation the step of the whole network; for a local loss the step of the
    hungriest unit, with that unit alone in memory (weights, local loss, optimizer state, input, activations), which is
    what ``blockwise`` holds with one unit in each block. In both, gradients are applied and freed in the backward pass.
    The paper measured a device's memory with the whole network resident, so its megabytes are others.

    Args:
        chain: the network, on the meta device.
        workload: what is trained.
        hardware: where.
        local_losses: names; every registered one by default.

    Returns:
        By method: ``macs`` per sample, ``additional_parameters`` and ``peak_bytes``.
    """
    rows = {}
    for method, signal in learning_signal(chain, workload.classes, local_losses).items():
        strategy: Any = (
            strategy_class("backprop")(accumulate=False)
            if method == BACKPROP
            else strategy_class("blockwise")(local_loss=method)
        )
        probes = strategy.probes(workload, chain, hardware)
        peak = max(_peak_bytes(probe, workload.batch_size) for probe in probes)
        rows[method] = {**signal._asdict(), "peak_bytes": peak}
    return rows


def _peak_bytes(probe: Probe, batch: int) -> int:
    """Tensor bytes of a step; of two samples where BatchNorm refuses one."""
    try:
        return probe.floor(batch)
    except ValueError:
        if batch > 1:
            raise
        return probe.floor(2)
