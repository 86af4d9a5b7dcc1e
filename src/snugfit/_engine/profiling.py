"""The statistics of every unit of a model, and tables of them that a profile may add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from snugfit._core.option_groups import Trained
from snugfit._core.request import Request
from snugfit._core.serial import to_data
from snugfit._engine.planning import make_plan
from snugfit._engine.process import choose_device
from snugfit._training.events import Notice, Subscriber
from snugfit.errors import UsageError
from snugfit.memory import MemoryLimit
from snugfit.strategies.blockwise.signal_table import signal_table
from snugfit.strategies.elastic.tensor_table import tensor_table
from snugfit.strategies.sidenet.activation_table import activation_table


@dataclass(frozen=True)
class Extras:
    """Tables that a profile adds to its units; see :func:`snugfit.profile_request`."""

    learning_signal: bool = False
    tensors: bool = False
    activation_memory: bool = False
    trained: Trained | None = None


def profile_units(request: Request, subscribers: Sequence[Subscriber], extras: Extras) -> dict[str, Any]:
    """Measure every unit of a model; see :func:`snugfit.profile_request`."""
    if request.data.task != "classify":
        raise UsageError(
            "profile measures units with classification losses; use snugfit plan --task detect for the whole network."
        )
    request = replace(
        request,
        strategy=replace(request.strategy, strategy="blockwise"),
        budget=replace(request.budget, time_ratio=None),  # units are measured without a strategy's options
    )
    measures = extras.learning_signal or extras.tensors or not extras.activation_memory
    found = make_plan(request, None, None, subscribers, measures=measures)
    workload, profile = found.plan.workload, found.profile
    seconds = {name.rpartition(":")[2]: line.sample_seconds for name, line in profile.lines.items()}
    untimed = 0.0 if measures else None
    units = [{**to_data(unit), "seconds": seconds.get(unit.name, untimed)} for unit in profile.units]
    data: dict[str, Any] = {"model": workload.model, "input_shape": list(workload.input_shape), "units": units}
    device = choose_device(request.machine.device)
    limit = MemoryLimit(found.plan.budget.memory_bytes, found.baseline, device)
    if extras.learning_signal:
        data["learning_signal"] = signal_table(found.assembly.chain, workload, found.plan.hardware)
    if extras.tensors:
        count = sum(1 for unit in found.assembly.chain.all_units for _ in unit.module.parameters())
        for subscriber in subscribers:
            subscriber(Notice(f"timing {count} tensors one by one"))
        data |= tensor_table(found.assembly.chain, workload, profile, limit, lean=request.strategy.lean)
    if extras.activation_memory:
        table = activation_table(found.assembly.chain, workload, extras.trained, limit, lean=request.strategy.lean)
        data["activation_memory"] = table
    return data
