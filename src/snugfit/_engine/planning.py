"""From a request to a plan: assemble the work, measure it within the budget, and rank what the strategies propose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import nn

from snugfit._core.budget import Budget
from snugfit._core.explanation import command_of
from snugfit._core.plan import Plan
from snugfit._core.profile import Profile
from snugfit._core.request import Request
from snugfit._data import Splits
from snugfit._engine.builder import Assembly, assemble, check_options, make_strategies
from snugfit._engine.history import measurements, past_runs
from snugfit._engine.process import baseline, choose_device, describe_hardware
from snugfit._planner import MeasurementContext, PlanningInput, StrategySelection, search
from snugfit._training.events import Notice, ProbeMeasured, Subscriber
from snugfit._training.initial_weights import check_weights
from snugfit.memory import Baseline, MemoryLimit, is_out_of_memory, make_meter, release_memory


@dataclass(frozen=True)
class Planned:
    """A plan with all that is needed to run it.

    Attributes:
        plan: the plan as data.
        profile: the measurements behind it.
        assembly: data, model and workload.
        baseline: that of the process.
    """

    plan: Plan
    profile: Profile
    assembly: Assembly
    baseline: Baseline


def make_plan(
    request: Request,
    splits: Splits | None,
    module: nn.Module | Callable[[], nn.Module] | None,
    subscribers: Sequence[Subscriber],
    *,
    measures: bool = True,
) -> Planned:
    """Measure, and ask every strategy that serves the request what fits its budget.

    Args:
        request: the options.
        splits: data passed from Python; None opens the data set that the request names.
        module: a module passed from Python, or a function that makes one; None builds the model that the request names.
        subscribers: receive every measured probe and notice.
        measures: whether strategies measure and propose; if not, the profile holds statistics of the units alone.
    """
    check_options(request)
    considered = make_strategies(request) if measures else StrategySelection([])
    budget = Budget(**asdict(request.budget))
    aim = request.strategy.aim or ("time" if request.model.weights is None else "accuracy")
    device = choose_device(request.machine.device)
    resting = baseline(request.machine.threads)
    hardware = describe_hardware(device)
    known, runs = measurements(request.machine, hardware), past_runs(request.machine, hardware)

    def measured(name: str, index: int, count: int) -> None:
        for subscriber in subscribers:
            subscriber(ProbeMeasured(name, index, count))

    def attempt(memory_bytes: int | None, on_measured: Callable[[str, int, int], None] | None) -> Planned:
        with MemoryLimit(memory_bytes, resting, device) as limit:
            assembly = assemble(request, splits, module)
            if request.model.weights is not None:
                check_weights(Path(request.model.weights), assembly.chain)
            question = PlanningInput(assembly.workload, assembly.chain, hardware, budget, aim)
            measuring = MeasurementContext(make_meter(resting, device), limit, on_measured, known)
            found, profile = search(question, considered, measuring, runs)
        found = replace(found, command=command_of(request, found))
        return Planned(found, profile, assembly, resting)

    try:
        planned = attempt(budget.memory_bytes, measured)
        for note in (*planned.assembly.splits.notes, *_reused(known.found)):
            for subscriber in subscribers:
                subscriber(Notice(note))
        return planned
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    release_memory()
    return attempt(None, None)  # not even data and chain fit: plan without measurements


def _reused(count: int) -> list[str]:
    if not count:
        return []
    return [f"{count} measurements of this machine were cached; --profile-cache renew repeats them"]
