"""Probes of a training step of one unit with its local loss (NeuroFlux section 5.2)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from snugfit._chain import Chain
from snugfit._core.hardware import Hardware
from snugfit._core.options import CacheDtype
from snugfit._core.profile import HeapUse
from snugfit._core.registry import strategy_class
from snugfit._core.workload import Workload
from snugfit.local.assignment import Layout
from snugfit.local.base import Objective
from snugfit.local.signal import BACKPROP, learning_signal
from snugfit.profiling import Probe, describe
from snugfit.strategies.blockwise.modules import ModuleCosts
from snugfit.strategies.blockwise.worker import BlockTrainer, LocalUnit, Recomputation
from snugfit.strategies.memory_estimates import (
    partial_gradient_bytes,
    place_synthetic_weights,
    random_batch,
    require_images,
    stored_batches,
)
from snugfit.strategies.recomputation.dynamic_program import UnitCost
from snugfit.strategies.recomputation.schedule import Schedule
from snugfit.strategies.recomputation.unit_costs import module_cost
from snugfit.strategies.step_floor import step_floor

PROBE_PREFIX = "unit:"


def module_probe_name(units: Sequence[str], schedule: str = "") -> str:
    """Key of the line of a module with its local loss.

    Args:
        units: names of its units.
        schedule: which of them run again, as a ``Schedule`` prints; empty if none does.
    """
    ends = units[:1] if len(units) == 1 else (units[0], units[-1])
    return f"{PROBE_PREFIX}{'..'.join(ends)}" + (f" {schedule}" if schedule else "")


def unit_probes(layout: Layout, workload: Workload, hardware: Hardware, dtype: CacheDtype) -> list[Probe]:
    """One probe per module without recomputation; ``dtype`` is the type of stored activations."""
    return [module_probe(layout, index, "", workload, hardware, dtype) for index in range(len(layout))]


def module_probe(
    layout: Layout, index: int, schedule: str, workload: Workload, hardware: Hardware, dtype: CacheDtype
) -> Probe:
    """The probe of a module's training step with its local loss.

    Args:
        layout: the modules.
        index: of the module.
        schedule: which of its units run again; empty if none does.
        workload, hardware: what is trained, and on which device.
        dtype: type of stored activations.
    """
    module, units = layout.modules[index], [layout.chain.units[number] for number in layout.units(index)]

    def make(where: str) -> BlockTrainer:
        merged, parts, loss = copy.deepcopy((module.module, [unit.module for unit in units], layout.make_loss(index)))
        place_synthetic_weights(merged, where)
        place_synthetic_weights(loss, where)
        recomputation = Recomputation(parts, Schedule.parse(schedule)) if schedule else None
        return BlockTrainer([LocalUnit(merged, loss, workload, recomputation)])

    def build() -> Callable[[int], object]:
        trainer = make(hardware.device)

        def step(batch: int) -> None:
            stored = stored_batches(module.input_shape, batch, dtype)
            inputs, labels = random_batch(module.input_shape, workload.classes, batch, hardware.device)
            trainer.step(inputs, labels)
            del stored

        return step

    def floor(batch: int) -> int:
        trainer = make("meta")
        require_images(batch, limit, *trainer.modules)
        optimizers = [unit.optimizers for unit in trainer.units]
        return step_floor(
            trainer, optimizers, lambda: random_batch(module.input_shape, workload.classes, batch, "meta")
        )

    limit = min(workload.batch_limit, workload.train_count)
    name, loss = module_probe_name([unit.name for unit in units], schedule), layout.make_loss(index)
    same = f"{module.input_shape} {describe(module.module)}\n{describe(loss)}" + (f"\n{schedule}" if schedule else "")
    partial = partial_gradient_bytes(workload, hardware.device, module.module, loss)
    kept = kept_bytes(layout, index, workload)
    weighted = [each for each in module.module.modules() if isinstance(each, (nn.Conv2d, nn.Linear))]
    heap: HeapUse = "recomputed" if schedule else "layers"
    heap = heap if len(weighted) > 1 else "steps"  # one layer takes most of a step
    return Probe(name, build, floor, limit, kept_bytes=kept, same=same, partial_bytes=partial, heap=heap)


def kept_bytes(layout: Layout, index: int, workload: Workload) -> int:
    """Bytes of a module between two of its steps: weights, buffers, local loss, optimizer state."""
    return sum(_kept_bytes(module, workload) for module in (layout.modules[index].module, layout.make_loss(index)))


def _kept_bytes(module: nn.Module, workload: Workload) -> int:
    weights = sum(parameter.nbytes for parameter in module.parameters())
    state = math.ceil(weights * workload.optimizer.state_per_parameter)
    return weights + state + sum(buffer.nbytes for buffer in module.buffers())


def module_costs(layout: Layout, units: Sequence[UnitCost], workload: Workload, batch: int) -> ModuleCosts:
    """What units and local losses need in a step at a batch size, from passes on the meta device.

    Args:
        layout: one module per unit.
        units: costs of the chain's units, which do not depend on the local loss.
        workload: classes and optimizer.
        batch: images at once.
    """
    losses = [layout.make_loss(index) for index in range(len(layout))]
    shapes = [
        (batch, *(unit.map_shape if loss.before_pool else unit.output_shape))
        for unit, loss in zip(layout.chain.units, losses, strict=True)
    ]
    return ModuleCosts(
        units[: len(layout)],
        [
            module_cost(Objective(copy.deepcopy(each), (batch, *unit.input_shape)), shape, 0.0)
            for unit, each, shape in zip(layout.chain.units, losses, shapes, strict=True)
        ],
        [_kept_bytes(unit.module, workload) for unit in layout.chain.units],
        [_kept_bytes(loss, workload) for loss in losses],
        [4 * math.prod((batch, *unit.input_shape)) for unit in layout.chain.units],
    )


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
            probes = strategy_class("backprop")(accumulate=False).probes(workload, chain, hardware)
        else:
            layout = Layout.of(chain, method, workload.classes, label_smoothing=workload.label_smoothing)
            probes = unit_probes(layout, workload, hardware, "float16")
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
