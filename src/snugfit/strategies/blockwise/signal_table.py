"""The table of the learning signal: arithmetic, parameters and memory of each training method."""

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
    from a run on the meta device. For backpropagation it is the step of the whole network. For a local loss it is the
    step of the unit that needs most, with only that unit in memory (weights, local loss, optimizer state, input,
    activations), as in ``blockwise`` with one unit per block. The backward pass applies and frees gradients in both.
    The paper measured a device's memory with the whole network resident, so its figures differ.

    Args:
        chain: the network, on the meta device.
        workload: data shapes, batch size and optimizer.
        hardware: the device.
        local_losses: names; all registered ones by default.

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
    """Tensor bytes of a step; with two samples if BatchNorm rejects one."""
    try:
        return probe.floor(batch)
    except ValueError:
        if batch > 1:
            raise
        return probe.floor(2)
