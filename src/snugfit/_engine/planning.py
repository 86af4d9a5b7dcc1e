"""From a request to a plan, or to the statistics of every unit, measured within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from snugfit._core.amounts import parse_seconds
from snugfit._core.budget import Budget
from snugfit._core.explanation import command_of
from snugfit._core.forking import may_fork
from snugfit._core.known import IMAGENET
from snugfit._core.profile import Profile
from snugfit._core.request import Request
from snugfit._data import Splits
from snugfit._data.class_counts import class_notes
from snugfit._engine.builder import Assembly, assemble, check_options, make_strategies
from snugfit._engine.history import measurements, past_runs
from snugfit._engine.loading import ModuleOrFactory
from snugfit._engine.process import baseline, choose_device, describe_hardware
from snugfit._engine.run_memory import budget_warning, device_plan, measurable_bytes, memory_at_rest, settled_budget
from snugfit._engine.tasks import import_for
from snugfit._planner import MeasurementContext, PlanningInput, StrategySelection, search
from snugfit._planner.kept_memory import with_kept_memory
from snugfit._planner.search import SearchResult
from snugfit._training.events import Event, Notice, ProbeMeasured, Subscriber, without_notices
from snugfit._training.initial_weights import check_weights, weights_note
from snugfit._training.own_parts import OwnParts
from snugfit.errors import MEMORY_ERRORS
from snugfit.memory import Baseline, MemoryLimit, is_out_of_memory, make_meter, release_memory
from snugfit.memory.process import late_bytes, library_import
from snugfit.profiling import META_PASS_BYTES, Measurements

BUSY_SHARE = 0.1
"""A plan mentions other processes if they added more than this share of the time in which it measured."""
Extent = Literal["all", "decisive", "nothing"]
"""What a plan measures."""


@dataclass(frozen=True)
class Planned(SearchResult):
    """A plan with all that is needed to run it: measurements, data, model, workload, and the process's baseline."""

    assembly: Assembly = field(kw_only=True)
    baseline: Baseline = field(kw_only=True)


def make_plan(
    request: Request,
    splits: Splits | None,
    module: ModuleOrFactory | None,
    subscribers: Sequence[Subscriber],
    *,
    measures: Extent = "all",
    own: OwnParts | None = None,
    fresh: bool = False,
) -> Planned:
    """Measure, and collect what the strategies that serve the request propose within its budget.

    Args:
        request: the options.
        splits, module: data and model passed from Python; None opens and builds those that the request names.
        subscribers: receive every measured probe and notice.
        measures: all strategies; or those that decide, without others that cannot be chosen if the one to fine-tune
            with fits; or nothing, so that the profile holds statistics of the units alone.
        own: functions passed from Python.
        fresh: whether training may run in a fresh process.
    """
    if request.model.weights == IMAGENET:
        with library_import():
            from snugfit._models.pretrained import pretrained_file

            path = pretrained_file(request.model.model)
        request = replace(request, model=replace(request.model, weights=str(path)))
    plan = partial(_planned, request, splits, module, measures=measures, own=own or OwnParts(), fresh=fresh)
    planned = plan(subscribers)
    memory = planned.plan.memory if request.budget.total_memory is not None else None
    if memory is not None and memory.process_bytes != planned.baseline.anon + late_bytes():
        planned = plan(without_notices(subscribers))  # late imports leave less of a total
    for note in _notes(planned.assembly, measures=measures != "nothing"):
        for subscriber in subscribers:
            subscriber(Notice(note))
    return planned


def _notes(assembly: Assembly, *, measures: bool) -> Iterator[str]:
    """What the user should know of data and network; of classes only if there is to be training."""
    splits, workload = assembly.splits, assembly.workload
    yield from splits.notes
    if measures and workload.task != "detect" and assembly.request.data.input_shape is None:
        weighted = bool(workload.class_weights) or workload.loss != "cross-entropy" or workload.task != "classify"
        kinds = {"weighted": weighted, "pretrained": workload.pretrained}
        yield from class_notes(splits.train.labels, splits.class_names, **kinds)
    if assembly.request.model.weights is not None:
        yield weights_note(Path(assembly.request.model.weights), assembly.chain)
    if assembly.chain.undivided:
        yield f"the network is trained as a whole, since it cannot be divided into units: {assembly.chain.undivided}"


def _planned(
    request: Request,
    splits: Splits | None,
    module: ModuleOrFactory | None,
    subscribers: Sequence[Subscriber],
    *,
    measures: Extent,
    own: OwnParts,
    fresh: bool,
) -> Planned:
    """One plan by the memory at rest now."""
    import_for(request)
    check_options(request)
    considered = make_strategies(request) if measures != "nothing" else StrategySelection([])
    device = choose_device(request.machine.device)
    resting = baseline(request.machine.threads, device)
    memory = memory_at_rest(resting, device)
    budget, free = settled_budget(request.budget, memory), 0 if memory is None else max(memory.headroom_bytes, 0)
    hardware = describe_hardware(device)
    known, runs = measurements(request.machine, hardware), past_runs(request.machine, hardware)
    limited = None if request.machine.profile_time is None else parse_seconds(request.machine.profile_time)

    def emit(event: Event) -> None:
        for subscriber in subscribers:
            subscriber(event)

    if warning := budget_warning(budget, memory):
        emit(Notice(warning))

    def attempt(memory_bytes: int | None, on_measured: Callable[[str, int, int], None] | None) -> Planned:
        with MemoryLimit(memory_bytes, resting, device, host_bytes=budget.host_memory_bytes) as limit:
            with limit.allow_address_space(META_PASS_BYTES):
                assembly = assemble(request, splits, module, own)
            own.check(assembly.workload, device)
            if request.model.weights is not None:
                check_weights(Path(request.model.weights), assembly.chain)
            work, chain, aim = assembly.workload, assembly.chain, request.aim
            question = PlanningInput(work, chain, hardware, budget, aim, measures != "decisive", fresh, limited, free)
            meter = make_meter(resting, device)
            apart = on_measured is not None and _measures_apart(budget, device)
            new_meter = partial(make_meter, resting, device) if apart else None
            measuring = MeasurementContext(meter, limit, on_measured, known, new_meter)
            found = search(question, considered, measuring, runs)
        plan = replace(found.plan, command=command_of(request, found.plan), memory=memory)
        plan = replace(with_kept_memory(plan), device_memory=device_plan(device, meter))
        return Planned(**{**vars(found), "plan": plan}, assembly=assembly, baseline=resting)

    try:
        planned = attempt(measurable_bytes(budget, memory), lambda *progress: emit(ProbeMeasured(*progress)))
        for note in _measurement_notes(planned.profile, known):
            emit(Notice(note))
        return planned
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
    release_memory()
    return attempt(None, None)  # not even data and chain fit: plan without measurements


def _measurement_notes(profile: Profile, known: Measurements) -> Iterator[str]:
    """What a user must know of the measurements."""
    if known.found:
        were, them = ("s of this machine were", "them") if known.found > 1 else (" of this machine was", "it")
        yield f"{known.found} measurement{were} cached; --profile-cache renew repeats {them}"
    if profile.delay_share > BUSY_SHARE:
        yield (
            f"other processes used the processor while snugfit measured, which took {profile.delay_share:.0%} of that "
            "time. Predicted times leave this out: beside other work, training takes longer"
        )


def _measures_apart(budget: Budget, device: torch.device) -> bool:
    """Whether each strategy is measured in a forked process: with a memory budget that counts this process alone.

    Where torch finds an accelerator, backward passes start threads for it, and then fail in a forked process.
    """
    counts = budget.memory_bytes is not None and budget.total_memory_bytes is None
    on_cpu = device.type == "cpu" and not torch.accelerator.is_available()
    return counts and budget.devices == 1 and on_cpu and may_fork()
