"""The strategy ``checkpoint``, described without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from snugfit._core.option_groups import BaseRequest
from snugfit._core.paths import writable_folder
from snugfit._core.strategy_config import StrategyConfig, present
from snugfit._quantities import format_bytes
from snugfit.strategies.micro_batch import AccumulationOptions


class Config(StrategyConfig):
    """Backpropagation that recomputes as little as the memory budget allows."""

    name = "checkpoint"
    implementation = "snugfit.strategies.checkpoint.strategy:Checkpoint"
    options = AccumulationOptions
    order = 20
    exact = True
    rounds_state = True
    trains_fresh = True
    expected_loss = 0
    activations = ("paged",)
    rounds_weights = True
    scales_loss = True
    whole_loss = True

    def terms(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The units that run again, and those that page."""
        schedule = settings.get("recomputation", "")
        verbs = present({"pages": "[" in schedule, "recomputes": "(" in schedule})
        return present({f"{' and '.join(verbs)} {schedule}": bool(verbs)})

    def explanation(self, settings: Mapping[str, Any], parts: Sequence[str]) -> Iterable[str]:
        """What is paged."""
        size = int(settings.get("paged_bytes", 0)) * int(settings.get("micro_batch", 0))
        if size:
            step = "micro-batch" if int(settings.get("micro_batches", 1)) > 1 else "step"
            where = "disk" if settings.get("paging_folder") else "host memory"
            yield (
                f"Each {step} writes up to {format_bytes(size)} of activations to {where} and reads them back; its "
                "predicted time includes that."
            )

    def settings(self, request: BaseRequest) -> dict[str, Any]:
        """The folder in which paging is measured, on the disk of the run."""
        machine = request.machine
        if request.training.activations != "paged":
            return {}
        return {"paging_folder": writable_folder(machine.cache_dir, machine.out, "runs")}
