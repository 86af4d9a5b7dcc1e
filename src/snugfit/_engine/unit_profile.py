"""Tables of every unit of a model: statistics, seconds, learning signals, and activation memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from snugfit._core.option_groups import Trained
from snugfit._core.request import Request
from snugfit._core.serial import to_data
from snugfit._engine.planning import make_plan
from snugfit._engine.process import choose_device
from snugfit._engine.run_memory import by_flag, measurable_bytes
from snugfit._training.events import Notice, Subscriber
from snugfit.errors import ModelError, UsageError
from snugfit.memory import MemoryLimit
from snugfit.strategies.blockwise.loss_choice import settled
from snugfit.strategies.blockwise.probes import signal_table
from snugfit.strategies.elastic.probes import tensor_table
from snugfit.strategies.sidenet.activation_table import activation_table


def profile_units(
    request: Request,
    subscribers: Sequence[Subscriber],
    *,
    learning_signal: bool,
    tensors: bool,
    activation_memory: bool,
    trained: Trained | None,
) -> dict[str, Any]:
    """Measure every unit of a model; see :func:`snugfit.profile_request`."""
    if request.data.task != "classify":
        raise UsageError(
            "profile measures units with classification losses; for the whole network use snugfit plan --task "
            f"{request.data.task}."
        )
    named: dict[str, Any] = {"module_units": "1", "local_loss": settled(request.strategy.local_loss)}
    request = replace(
        request,
        strategy=replace(request.strategy, strategy="blockwise", **named),
        budget=replace(request.budget, time_ratio=None),  # units are measured without a strategy's options
    )
    measures = learning_signal or tensors or not activation_memory
    found = make_plan(request, None, None, subscribers, measures="all" if measures else "nothing")
    if found.assembly.chain.undivided:
        raise ModelError(f"profile measures units, and the network has none: {found.assembly.chain.undivided}.")
    chain, workload, profile = found.assembly.chain, found.plan.workload, found.profile
    seconds = {name.rpartition(":")[2]: line.sample_seconds for name, line in profile.lines.items()}
    untimed = 0.0 if measures and profile.lines else None
    units = [{**to_data(unit), "seconds": seconds.get(unit.name, untimed)} for unit in profile.units]
    data: dict[str, Any] = {"model": workload.model, "input_shape": list(workload.input_shape), "units": units}
    if workload.inputs:
        data["inputs"] = to_data(workload.inputs)
    if measures and not profile.lines:
        for subscriber in subscribers:
            subscriber(Notice(f"units are not timed: {'; '.join(found.plan.candidates[0].reasons)}"))
    device = choose_device(request.machine.device)
    limit = MemoryLimit(measurable_bytes(found.plan.budget, found.plan.memory), found.baseline, device)
    if learning_signal:
        data["batch_size"] = workload.batch_size
        data["learning_signal"] = signal_table(chain, workload, found.plan.hardware)
    if tensors:
        count = sum(1 for unit in chain.all_units for _ in unit.module.parameters())
        for subscriber in subscribers:
            subscriber(Notice(f"timing {count} tensors one by one"))
        with by_flag(found.plan):
            data |= tensor_table(chain, workload, profile, limit, lean=request.strategy.lean)
    if activation_memory:
        table = activation_table(chain, workload, trained, limit, lean=request.strategy.lean)
        data["activation_memory"] = table
    return data
