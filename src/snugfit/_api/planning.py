"""Plan: which strategies fit a budget, and what each costs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from snugfit._api.training import TrainedRecord, shown
from snugfit._core.budget import Budget
from snugfit._core.keywords import PlanKeywords, with_keywords
from snugfit._core.known import check_foreign_options, require_data
from snugfit._core.option_groups import FROM_PYTHON, BudgetOptions, Trained
from snugfit._core.options import Count, checked
from snugfit._core.record import TRIAL_STEPS, Trial
from snugfit._core.request import Request
from snugfit._engine.builder import for_data, own_splits, require_optimizer_name
from snugfit._engine.distributed import commands_of_run
from snugfit._engine.planning import Extent, Planned, make_plan
from snugfit._engine.running import begin, execute
from snugfit._planner import infeasible_error
from snugfit._storage.outputs import require_places
from snugfit._training.events import Subscriber
from snugfit._training.own_parts import FUNCTIONS, OwnParts
from snugfit._training.stopping import StopFlag
from snugfit.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack


_OWN_OPTIMIZER = (
    "Pass a function that makes an optimizer of each parameter, like functools.partial(torch.optim.SGD, lr=0.01)."
)


@dataclass(frozen=True)
class RunnablePlan(Planned):
    """A plan with all that is needed to run it; prints as a table.

    >>> import snugfit
    >>> small = {"strategy": "backprop", "epochs": 1, "image_size": 8, "max_train": 32, "memory": "100MB"}
    >>> planned = snugfit.plan("smallconv", "digits", **small)
    >>> print(planned)
    smallconv on digits, budget 100.0 MB of memory
                      predicted  time per    time
    strategy    fits       peak     epoch  in all  storage  exact  why not, or notes
    * backprop  yes ...
    Chosen: backprop, ...
    backprop is chosen: it was asked for.
    Its gradients are exact: those of plain backpropagation.
    Its peak includes ...
    Memory in all: ...
    Run it: ...
    >>> record = planned.run(subscribers=(), out="runs/planned")
    >>> record.measured["peak_bytes"] <= record.predicted["peak_bytes"]
    True

    Attributes:
        plan: the plan as data.
        profile: the measurements behind it.
    """

    def __str__(self) -> str:
        from snugfit._report.tables import plan_text

        return plan_text(self.plan)

    def to_json(self) -> dict[str, Any]:
        """The plan as data."""
        return self.plan.to_json()

    def run(
        self,
        subscribers: Sequence[Subscriber] | None = None,
        out: str | Path | None = None,
        stop: StopFlag | None = None,
    ) -> TrainedRecord:
        """Train as planned.

        Args:
            subscribers: called with every event; progress bars on stderr by default, nothing for ``()``.
            out: run folder; a new one under ``runs/`` by default.
            stop: ends the run between two steps once it is requested (by a subscriber, or another thread).

        Raises:
            UsageError: it was planned without data.
            InfeasibleBudgetError: nothing fits the budget.
            InterruptedRunError: it was stopped; :func:`snugfit.resume` continues.
            SnugfitError: as training may raise; see ``snugfit.errors``.
        """
        self._require_runnable()
        return TrainedRecord(execute(self, shown(subscribers), out, stop), self.assembly.module)

    def begin(self) -> Path:
        """Write the run folder, from which :func:`snugfit.resume` trains in another process, and return it.

        Raises:
            UsageError: it was planned without data, or takes several processes.
            InfeasibleBudgetError: nothing fits the budget.
        """
        self._require_runnable()
        return begin(self, self.assembly.request.machine.out)

    def compare(self, steps: int = TRIAL_STEPS, subscribers: Sequence[Subscriber] = ()) -> list[Trial]:
        """Compare the predictions with one short real run of each strategy that fits, inside the budget.

        Each runs in a fresh process; or in this one, on a copy of the module, if model or data came from Python.

        Args:
            steps: effective batches of each run.
            subscribers: called with a notice of each run.

        Raises:
            UsageError: the number of steps is below 1.
            InfeasibleBudgetError: nothing fits the budget.
        """
        checked("compare_steps", Count, steps)
        if self.plan.choice is None:
            raise infeasible_error(self.plan)
        from snugfit._engine.trials import compare

        return compare(self, steps, subscribers)

    def _require_runnable(self) -> None:
        if self.plan.choice is None:
            raise infeasible_error(self.plan)
        self._require_processes()
        require_data(self.assembly.request.data)

    def _require_processes(self) -> None:
        """Refuse a plan over several processes in a single one."""
        choice = self.plan.choice
        processes = choice.processes if choice else 1
        if processes > 1 and commands_of_run() is None:
            how = shlex.join(self.plan.command) if self.plan.command else f"cluster launch --processes {processes}"
            raise UsageError(f"this plan takes {processes} processes, and this is one; start them with `{how}`.")


def plan_request(
    request: Request, subscribers: Sequence[Subscriber] = (), *, measures: Extent = "all", fresh: bool = False
) -> RunnablePlan:
    """Check that the run folder of a request can be made, and plan; ``fresh`` if training may be in another process.

    >>> request = Request.of(model="smallconv", image_size=8, memory="100MB", strategy="backprop")
    >>> plan_request(request).plan.choice.feasible
    True
    """
    require_places(request.machine.out, request.machine.cache_dir)
    return RunnablePlan(**vars(make_plan(request, None, None, subscribers, measures=measures, fresh=fresh)))


def plan(
    model: str | nn.Module | Callable[[], nn.Module] = "vgg16",
    data: Any = None,
    budget: Budget | None = None,
    *,
    subscribers: Sequence[Subscriber] = (),
    **options: Unpack[PlanKeywords],
) -> RunnablePlan:
    """Say which strategies fit a budget, and what each costs.

    >>> from torch import nn
    >>> import snugfit
    >>> def make_model():
    ...     return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    >>> budget = snugfit.Budget(memory="100MB")
    >>> planned = snugfit.plan(make_model, "digits", budget, strategy="backprop", image_size=8, max_train=32)
    >>> [candidate.strategy for candidate in planned.plan.candidates if candidate.feasible]
    ['backprop']

    Args:
        model: a name, a module, or a function that makes a module. A module is emptied when the plan runs: its weights
            move to disk, or they would count to the budget during the whole run. The record's ``model`` is trained.
        data: a name, ``folder:PATH``, :class:`snugfit.Splits`, a ``Dataset`` of (image, label), or a pair or
            triple of them: training, validation and test. By default it is ``digits``; or none, with the options
            ``input_shape=(3, 32, 32)`` and ``classes``, for a plan that cannot run.
        budget: what may be used; unlimited by default. The options ``memory``, ``total_memory``, ``host_memory``,
            ``storage``, ``time_ratio`` and ``devices`` say the same.
        subscribers: called with every measured probe.
        **options: any option of the command line, with underscores: ``epochs=3``, ``strategy="blockwise"``. ``loss``
            may be a function of logits (B, classes) and labels (B,) that returns their mean loss, a scalar tensor;
            ``schedule`` a function of step, from 0, and number of steps that returns a share of the learning rate;
            ``optimizer`` a function of a group of one parameter, ``[(name, parameter)]``, that returns its torch
            optimizer; ``metrics`` a dictionary of objects with update, compute and reset, for the record and
            ``metrics.csv``.

    Raises:
        UsageError: an option that does not exist, or that contradicts another.
        DataError, ModelError: data or model cannot be used.
    """
    shown(None)  # now, because what is imported after planning leaves less of a total
    own, named = _own_parts({**options})
    require_optimizer_name(named.get("optimizer"), "'sgd', 'adamw', 'schedulefree' or a function", _OWN_OPTIMIZER)
    request = Request.of(**named)
    check_foreign_options(request)
    require_places(request.machine.out, request.machine.cache_dir)
    splits, module = own_splits(data, request), None
    request = for_data(request, splits)
    if not isinstance(model, str):
        module, model = model, FROM_PYTHON
    request = replace(request, model=replace(request.model, model=model))
    name = FROM_PYTHON if splits is not None else None if data is None else str(data)
    request = replace(request, data=replace(request.data, data=name))
    if budget is not None:
        if not isinstance(budget, Budget):
            raise UsageError(f"budget is {budget!r}; pass a snugfit.Budget, or an option like memory=.")
        if request.budget != BudgetOptions():
            keywords = ", ".join(f"{each.name}=" for each in fields(BudgetOptions))
            raise UsageError(f"give the budget once: as snugfit.Budget(...), or as {keywords}.")
        request = replace(request, budget=_budget_options(budget))
    return RunnablePlan(**vars(make_plan(request, splits, module, subscribers, own=own)))


def _defaults() -> dict[str, Any]:
    """The options of a request with their defaults, and metrics, which Python alone takes."""
    request = Request()
    groups = [getattr(request, group.name) for group in fields(request)]
    return {option.name: getattr(group, option.name) for group in groups for option in fields(group)} | {
        "metrics": None
    }


vars(plan)["__signature__"] = with_keywords(plan, _defaults())


def _own_parts(options: dict[str, Any]) -> tuple[OwnParts, dict[str, Any]]:
    """Functions and metrics among options, and the options that a request has."""
    functions = {name: options[name] for name in FUNCTIONS if callable(options.get(name))}
    metrics = options.get("metrics") or {}
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) and name for name in metrics):
        raise UsageError("metrics= must be a dictionary of metrics by name, like {'f1': ...}.")
    rest = {name: value for name, value in options.items() if name != "metrics"}
    return OwnParts(**functions, metrics=dict(metrics)), {**rest, **dict.fromkeys(functions, FROM_PYTHON)}


def profile_request(
    request: Request,
    subscribers: Sequence[Subscriber] = (),
    *,
    learning_signal: bool = False,
    tensors: bool = False,
    activation_memory: bool = False,
    trained: Trained | None = None,
) -> dict[str, Any]:
    """Statistics of every unit of a model: parameters, MACs, bytes and seconds.

    If only the activation memory is wanted, no unit is timed, and its seconds are None.

    >>> found = profile_request(Request.of(model="smallconv", image_size=8), activation_memory=True)
    >>> found["units"][0]["macs"] > 0, found["activation_memory"]["peak_bytes"] > 0
    (True, True)

    Args:
        request: the options.
        subscribers: called with every measured probe.
        learning_signal: add each method's learning signal (``strategies.blockwise.probes.signal_table``).
        tensors: add the seconds of training each tensor (``strategies.elastic.probes``).
        activation_memory: add the activation memory of every block (``strategies.sidenet.activation_table``).
        trained: what trains; by default a side network if the model can have one, else everything.

    Raises:
        UsageError: ``trained`` is given without ``activation_memory``.
        ModelError: a side network is to train, and the model can have none.
        InfeasibleBudgetError: ``tensors`` is set, and no operator can be timed within the memory budget.
    """
    from snugfit._engine.unit_profile import profile_units

    if trained is not None and not activation_memory:
        raise UsageError("trained= is for the activation memory of blocks; add activation_memory=True.")
    return profile_units(
        request,
        subscribers,
        learning_signal=learning_signal,
        tensors=tensors,
        activation_memory=activation_memory,
        trained=checked("trained", Trained | None, trained),
    )


def _budget_options(budget: Budget) -> BudgetOptions:
    return BudgetOptions(**asdict(budget))
