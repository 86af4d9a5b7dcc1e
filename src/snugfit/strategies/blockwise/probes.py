"""Probes of a training step of one unit with its local loss (NeuroFlux section 5.2)."""

from __future__ import annotations

from collections.abc import Callable

from snugfit._core.hardware import Hardware
from snugfit._core.options import CacheDtype
from snugfit._core.workload import Workload
from snugfit.local.assignment import Layout
from snugfit.profiling import Probe, describe
from snugfit.strategies.blockwise.units import clone_unit, kept_bytes
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
        module, loss = clone_unit(layout, index)
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
