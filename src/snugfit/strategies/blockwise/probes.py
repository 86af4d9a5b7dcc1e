"""Probes of a training step of one unit with its local loss (NeuroFlux section 5.2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

from snugfit._chain import Chain
from snugfit._core.hardware import Hardware
from snugfit._core.options import CacheDtype
from snugfit._core.registry import strategy_class
from snugfit._core.workload import Workload
from snugfit.local.assignment import Layout
from snugfit.local.signal import BACKPROP, learning_signal
from snugfit.profiling import Probe, describe
from snugfit.strategies.blockwise.worker import BlockTrainer, LocalUnit
from snugfit.strategies.memory_estimates import (
    partial_gradient_bytes,
    place_synthetic_weights,
    random_batch,
    require_images,
    step_floor,
    stored_batches,
)


def unit_probe_name(unit_name: str) -> str:
    """Key of the line of a unit with its local loss."""
    return f"unit:{unit_name}"


def unit_probes(layout: Layout, workload: Workload, hardware: Hardware, dtype: CacheDtype) -> list[Probe]:
    """One probe per unit; ``dtype`` is the type of stored activations."""
    return [_unit_probe(layout, index, workload, hardware.device, dtype) for index in range(len(layout))]


def _unit_probe(layout: Layout, index: int, workload: Workload, device: str, dtype: CacheDtype) -> Probe:
    unit = layout.chain.units[index]

    def make(where: str) -> BlockTrainer:
        module, loss = copy.deepcopy(unit.module), copy.deepcopy(layout.make_loss(index))
        place_synthetic_weights(module, where)
        place_synthetic_weights(loss, where)
        return BlockTrainer([LocalUnit(module, loss, workload)])

    def build() -> Callable[[int], object]:
        trainer = make(device)

        def step(batch: int) -> None:
            stored = stored_batches(unit.input_shape, batch, dtype)
            inputs, labels = random_batch(unit.input_shape, workload.classes, batch, device)
            trainer.step(inputs, labels)
            del stored

        return step

    def floor(batch: int) -> int:
        trainer = make("meta")
        require_images(batch, limit, *trainer.modules)
        return step_floor(trainer, lambda: random_batch(unit.input_shape, workload.classes, batch, "meta"))

    limit = min(workload.batch_limit, workload.train_count)
    name, kept = unit_probe_name(unit.name), kept_bytes(layout, index, workload)
    same = f"{unit.input_shape} {describe(unit.module)}\n{describe(layout.make_loss(index))}"
    partial = partial_gradient_bytes(workload, device, unit.module, layout.make_loss(index))
    return Probe(name, build, floor, limit, kept_bytes=kept, same=same, partial_bytes=partial)


def kept_bytes(layout: Layout, index: int, workload: Workload) -> int:
    """Bytes of a unit between two of its steps: weights, buffers, local loss, optimizer state."""
    unit, loss = layout.chain.units[index].module, layout.make_loss(index)
    copies = 1 + workload.optimizer.state_per_parameter
    weights = sum(parameter.nbytes for module in (unit, loss) for parameter in module.parameters())
    return weights * copies + sum(buffer.nbytes for module in (unit, loss) for buffer in module.buffers())


def signal_table(
    chain: Chain, workload: Workload, hardware: Hardware, local_losses: Iterable[str] | None = None
) -> dict[str, dict[str, int]]:
    """One row for backpropagation and one for each local loss (LLS, Table 3). Nothing is allocated.

    ``peak_bytes`` are the peak tensor bytes of a training step at the workload's batch size and with its optimizer,
    from a run on the meta device. For backpropagation it is the step of the whole network. For a local loss it is the
    step of the unit that needs most, with only that unit in memory (weights, local loss, optimizer state, input,
    activations), as in ``blockwise`` with one unit per block. The backward pass applies and frees gradients in both.
    The paper measured a device's memory with the whole network resident, so its figures differ. The chain is on the
    meta device. All registered local losses are the default.
    """
    rows = {}
    for method, signal in learning_signal(chain, workload.classes, local_losses).items():
        if method == BACKPROP:
            strategy = strategy_class("backprop")(accumulate=False)
        else:
            strategy = strategy_class("blockwise")(local_loss=method)
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
