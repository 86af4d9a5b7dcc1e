"""From a request to a plan, or to the statistics of every unit, measured within the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snugfit._core.explanation import command_of
from snugfit._core.option_groups import Trained
from snugfit._core.plan import Plan
from snugfit._core.profile import Profile
from snugfit._core.request import Request
from snugfit._core.serial import to_data
from snugfit._data import Splits
from snugfit._engine.builder import Assembly, assemble, check_options, make_strategies
from snugfit._engine.history import measurements, past_runs
from snugfit._engine.loading import ModuleOrFactory
from snugfit._engine.process import baseline, choose_device, describe_hardware
from snugfit._engine.run_memory import budget_warning, by_flag, measurable_bytes, memory_at_rest, settled_budget
from snugfit._planner import MeasurementContext, PlanningInput, StrategySelection, search
from snugfit._training.events import Event, Notice, ProbeMeasured, Subscriber
from snugfit._training.initial_weights import check_weights
from snugfit.errors import UsageError
from snugfit.memory import Baseline, MemoryLimit, is_out_of_memory, make_meter, release_memory
from snugfit.memory.process import late_bytes
from snugfit.strategies.blockwise.loss_choice import settled
from snugfit.strategies.blockwise.probes import signal_table
from snugfit.strategies.elastic.probes import tensor_table
from snugfit.strategies.sidenet.activation_table import activation_table


@dataclass(frozen=True)
class Planned:
    """A plan with all that is needed to run it: measurements, data, model, workload, and the process's baseline."""

    plan: Plan
    profile: Profile
    assembly: Assembly
    baseline: Baseline


def make_plan(
    request: Request,
    splits: Splits | None,
    module: ModuleOrFactory | None,
    subscribers: Sequence[Subscriber],
    *,
    measures: bool = True,
) -> Planned:
    """Measure, and collect what the strategies that serve the request propose within its budget.

    Args:
        request: the options.
        splits, module: data and model passed from Python; None opens and builds those that the request names.
        subscribers: receive every measured probe and notice.
        measures: whether strategies measure and propose; if not, the profile holds statistics of the units alone.
    """
    planned = _planned(request, splits, module, subscribers, measures)
    memory = planned.plan.memory
    if request.budget.total_memory is None or memory is None:
        return planned
    if memory.process_bytes == planned.baseline.anon + late_bytes():
        return planned
    return _planned(request, splits, module, subscribers, measures)  # late imports leave less of a total


def _planned(
    request: Request,
    splits: Splits | None,
    module: ModuleOrFactory | None,
    subscribers: Sequence[Subscriber],
    measures: bool,
) -> Planned:
    """One plan by the memory at rest now."""
    check_options(request)
    considered = make_strategies(request) if measures else StrategySelection([])
    device = choose_device(request.machine.device)
    resting = baseline(request.machine.threads)
    memory = memory_at_rest(resting, device)
    budget = settled_budget(request.budget, memory)
    hardware = describe_hardware(device)
    known, runs = measurements(request.machine, hardware), past_runs(request.machine, hardware)

    def emit(event: Event) -> None:
        for subscriber in subscribers:
            subscriber(event)

    if warning := budget_warning(budget, memory):
        emit(Notice(warning))

    def attempt(memory_bytes: int | None, on_measured: Callable[[str, int, int], None] | None) -> Planned:
        with MemoryLimit(memory_bytes, resting, device) as limit:
            assembly = assemble(request, splits, module)
            if request.model.weights is not None:
                check_weights(Path(request.model.weights), assembly.chain)
            question = PlanningInput(assembly.workload, assembly.chain, hardware, budget, request.aim)
            measuring = MeasurementContext(make_meter(resting, device), limit, on_measured, known)
            found, profile = search(question, considered, measuring, runs)
        found = replace(found, command=command_of(request, found), memory=memory)
        return Planned(found, profile, assembly, resting)

    try:
        planned = attempt(measurable_bytes(budget, memory), lambda *progress: emit(ProbeMeasured(*progress)))
        for note in planned.assembly.splits.notes:
            emit(Notice(note))
        if known.found:
            emit(Notice(f"{known.found} measurements of this machine were cached; --profile-cache renew repeats them"))
        return planned
    except (RuntimeError, MemoryError, SystemError) as error:
        if not is_out_of_memory(error):
            raise
    release_memory()
    return attempt(None, None)  # not even data and chain fit: plan without measurements


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
            "profile measures units with classification losses; use snugfit plan --task detect for the whole network."
        )
    named: dict[str, Any] = {"module_units": "1", "local_loss": settled(request.strategy.local_loss)}
    request = replace(
        request,
        strategy=replace(request.strategy, strategy="blockwise", **named),
        budget=replace(request.budget, time_ratio=None),  # units are measured without a strategy's options
    )
    measures = learning_signal or tensors or not activation_memory
    found = make_plan(request, None, None, subscribers, measures=measures)
    chain, workload, profile = found.assembly.chain, found.plan.workload, found.profile
    seconds = {name.rpartition(":")[2]: line.sample_seconds for name, line in profile.lines.items()}
    untimed = 0.0 if measures else None
    units = [{**to_data(unit), "seconds": seconds.get(unit.name, untimed)} for unit in profile.units]
    data: dict[str, Any] = {"model": workload.model, "input_shape": list(workload.input_shape), "units": units}
    device = choose_device(request.machine.device)
    limit = MemoryLimit(measurable_bytes(found.plan.budget, found.plan.memory), found.baseline, device)
    if learning_signal:
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
