"""From strategies and a budget to a plan: measure probes, collect proposals, rank those that fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from snugfit._chain import Chain
from snugfit._core.budget import Aim
from snugfit._core.explanation import TOO_LATE, explanation_of
from snugfit._core.forking import Send, run_forked
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Candidate, Plan, ranked
from snugfit._core.profile import Profile
from snugfit._core.registry import config_of, find_config
from snugfit._core.serial import from_data, to_data
from snugfit._core.workload import Workload
from snugfit._planner.calibration import PastRun, correction
from snugfit._planner.candidates import candidates_of
from snugfit._planner.inputs import PlanningInput, StrategySelection
from snugfit._planner.kept_memory import with_kept_seconds
from snugfit._planner.probe_keys import description, identified
from snugfit._planner.proposals import Prober, Proposal, Proposals, merged
from snugfit._training.strategy import Strategy
from snugfit.errors import MEMORY_ERRORS, ModelError
from snugfit.memory import MemoryLimit, PeakMeter, is_out_of_memory, release_memory
from snugfit.profiling import (
    META_PASS_BYTES,
    Measurements,
    alone,
    in_fresh_process,
    in_next_process,
    measure_probes,
    unit_stats,
    without_others,
)

if TYPE_CHECKING:
    from snugfit.profiling import Probe, TensorProbe

GRAIN = 32768
"""Elements for which torch uses another thread."""
MOST_STACK_BYTES = 16_000_000
"""Address space of a thread's stack; it is 8 MiB unless ``ulimit -s`` or ``OMP_STACKSIZE`` says otherwise."""
LONG_SECONDS = 600.0
"""Predicted seconds of a run from which a refused strategy is measured again in a process of its own."""
NEAR = 1.65
"""Largest ratio of what a refused strategy is expected to need to the budget; such a one fitted alone."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        plan: feasible candidates first, the best of them first.
        profile: that of a process that trains the choice.
        next_profile: the same if the process finds these measurements in the cache.
        fresh: whether the choice trains in a fresh process, because memory that measuring left changes it.
        may_fit_alone: refused strategies that may fit where no other one was measured.
        apart: whether every strategy was measured in a process of its own.
    """

    plan: Plan
    profile: Profile
    next_profile: Profile
    fresh: bool = False
    may_fit_alone: tuple[str, ...] = ()
    apart: bool = False


@dataclass(frozen=True)
class MeasurementContext:
    """How probes are measured.

    Attributes:
        meter, limit: memory above the baseline, and the budget, in force.
        on_measured: called with every measured probe; None measures nothing, so nothing is feasible.
        known: earlier measurements; new ones are added.
        new_meter: makes a meter in a forked process; with it each strategy is measured in one. None measures them all
            in this process, where each has the memory that the others leave.
    """

    meter: PeakMeter
    limit: MemoryLimit
    on_measured: Callable[[str, int, int], object] | None
    known: Measurements = field(default_factory=Measurements)
    new_meter: Callable[[], PeakMeter] | None = None

    def profile(self, probes: Sequence[Probe | TensorProbe]) -> Profile:
        """Measure probes; only lower bounds if the budget has no headroom for measuring, even between two steps."""
        try:
            return measure_probes(probes, self.meter, self.limit, self.on_measured, self.known)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
        with self.limit.allow_address_space(META_PASS_BYTES):
            release_memory()
            return measure_probes(probes, self.meter, self.limit, None, self.known)

    def resting_bytes(self) -> int:
        """Bytes in use between measurements."""
        release_memory()
        self.meter.restart()
        return self.meter.current_bytes


def search(
    question: PlanningInput, considered: StrategySelection, measuring: MeasurementContext, runs: Sequence[PastRun] = ()
) -> SearchResult:
    """Measure the strategies' probes and rank what they propose; past runs, oldest first, correct predictions.

    If a strategy cannot be measured in a process of its own, all are measured in this one.

    Raises:
        ModelError: the only strategy finds the model unusable.
    """
    try:
        return _search(question, considered, measuring, runs)
    except ChildProcessError:
        return _search(question, considered, replace(measuring, new_meter=None), runs)


def _search(
    question: PlanningInput, considered: StrategySelection, measuring: MeasurementContext, runs: Sequence[PastRun]
) -> SearchResult:
    state, aim = Proposer.of(question, measuring, runs), question.aim
    first, others = _in_turn(question, considered.strategies)
    proposals, late = state.propose_in_time(first)
    standby = considered.standby
    not_considered = dict(considered.left_out)
    if others and any(each.feasible and each.fine_tunes for each in proposals.everywhere):
        not_considered |= {each.name: f"not measured, since {first[0].name} fits and is preferred" for each in others}
    elif others:
        proposals, late = state.propose_in_time(others, proposals)
    if late:
        not_considered |= {each.name: TOO_LATE for each in (*late, *standby)}
    elif standby and _is_settled(proposals.everywhere, aim):
        not_considered |= {each.name: _last_resort(each.name, aim) for each in standby}
    elif standby:
        proposals = state.propose(standby, proposals)
    rest = [
        Candidate(name, False, reasons=(reason,), exact=config_of(name).exact, considered=False)
        for name, reason in not_considered.items()
    ]
    plan, fresh = (_ranked_plan(question, [*each, *rest]) for each in (proposals.here, proposals.fresh))
    is_fresh = _changes_choice(plan, fresh) and state.has_more_room(proposals, fresh.choice)
    plan = fresh if is_fresh else plan
    return SearchResult(
        replace(plan, explanation=explanation_of(plan)),
        state.profile_of(proposals, plan.choice, fresh=is_fresh),
        state.next_profile_of(proposals, plan.choice, fresh=is_fresh),
        is_fresh,
        () if state.apart else state.may_fit_alone(plan),
        apart=state.apart,
    )


def _ranked_plan(question: PlanningInput, candidates: Iterable[Candidate]) -> Plan:
    """A plan that chooses the best feasible candidate, without explanation."""
    best = ranked(candidates, question.aim)
    chosen = 0 if best and best[0].feasible else None
    return Plan(question.workload, question.budget, question.hardware, best, chosen, question.aim)


def _changes_choice(plan: Plan, fresh: Plan) -> bool:
    """Whether a fresh process trains by a better strategy, or with better settings."""
    here, there = plan.choice, fresh.choice
    if here is None or there is None:
        return there is not None
    return ranked([here, there], plan.aim)[0] is there


def _in_turn(question: PlanningInput, strategies: Sequence[Strategy]) -> tuple[list[Strategy], list[Strategy]]:
    """Strategies to measure first, and those to measure only if the first do not fit; the latter may be none."""
    decides = not question.compares and question.aim == "accuracy" and question.workload.fine_tunes_few
    first = [each for each in strategies if decides and find_config(each.name).fine_tunes]
    others = [each for each in strategies if each not in first]
    return (first, others) if first else (others, [])


def _is_settled(candidates: Iterable[Candidate], aim: Aim) -> bool:
    """Whether strategies on standby are unnecessary."""
    return any(each.feasible and (aim == "time" or each.exact or each.fine_tunes) for each in candidates)


def _last_resort(name: str, aim: Aim) -> str:
    """Why a strategy on standby was not measured."""
    other = "else" if aim == "time" else "else that is exact"
    return f"{find_config(name).last_resort or name}: measured only where nothing {other} fits"


@dataclass(frozen=True)
class Proposer:
    """Measures probes of strategies and collects their proposals.

    Attributes:
        resting_bytes: what is in memory before any probe is made, which a fresh process has, too; None if training must
            run in this process.
        started: when it began, by ``time.monotonic``.
    """

    question: PlanningInput
    measuring: MeasurementContext
    runs: Sequence[PastRun]
    resting_bytes: int | None
    started: float

    @classmethod
    def of(cls, question: PlanningInput, measuring: MeasurementContext, runs: Sequence[PastRun]) -> Proposer:
        """The search, before anything is measured."""
        budget = question.budget
        fresh = question.fresh and budget.devices == 1 and question.hardware.device == "cpu"
        needed = measuring.new_meter is not None or (fresh and budget.memory_bytes is not None)
        resting = measuring.resting_bytes() if needed else None
        return cls(question, measuring, runs, resting, time.monotonic())

    @property
    def apart(self) -> bool:
        """Whether each strategy is measured in a process of its own."""
        return self.measuring.new_meter is not None

    def propose_in_time(
        self, strategies: Sequence[Strategy], before: Proposals | None = None
    ) -> tuple[Proposals, Sequence[Strategy]]:
        """Proposals, and the strategies for whose measurements there was no time although another one fits."""
        limit = self.question.profile_seconds
        if limit is None:
            return self.propose(strategies, before, only=len(strategies) == 1 and before is None), ()
        first = 1 if before is None else 0
        found = before or self.propose(strategies[:1], only=len(strategies) == 1)
        for number, strategy in enumerate(strategies[first:], start=first):
            if time.monotonic() - self.started > limit and any(each.feasible for each in found.everywhere):
                return found, strategies[number:]
            found = self.propose([strategy], found)
        return found, ()

    def propose(
        self, strategies: Sequence[Strategy], before: Proposals | None = None, *, only: bool = False
    ) -> Proposals:
        """Measure what strategies still need; those measured together propose again with the remaining headroom.

        Raises:
            ChildProcessError: a strategy could not be measured in a process of its own.
        """
        found = before or Proposals()
        if not self.apart:
            return self._together(strategies, found, only=only)
        for strategy in strategies:
            found = replace(found, apart={**found.apart, strategy.name: self._apart(strategy, only=only)})
        return found if strategies else replace(found, profile=Profile(unit_stats(self.question.chain)))

    def _apart(self, strategy: Strategy, *, only: bool) -> Proposal:
        """What a strategy proposes if it is measured in a forked process.

        Measuring leaves memory behind: kernels, and what the heap cannot return. It would count to the next strategy,
        so that what fits would depend on those before it.
        """
        measuring, on_measured = self.measuring, self.measuring.on_measured

        def told(progress: Any) -> None:
            if on_measured is not None:
                on_measured(*progress)

        try:
            data = run_forked(lambda send: to_data(self._alone(strategy, send, only=only)), told)
        finally:
            _start_threads(measuring.limit)
        found = from_data(Proposal, data)
        measuring.known.note_others(found.found, found.made)
        return found

    def _alone(self, strategy: Strategy, send: Send, *, only: bool) -> Proposal:
        """What a strategy proposes, in a forked process; every measured probe is sent."""
        measuring, known = self.measuring, self.measuring.known
        assert measuring.new_meter is not None
        _start_threads(measuring.limit)
        measuring = replace(
            measuring, meter=measuring.new_meter(), new_meter=None, on_measured=lambda *progress: send(progress)
        )
        state = replace(self, measuring=measuring)
        found = state._together([strategy], Proposals(), only=only)
        choice, fresh = found.fresh[0], find_config(strategy.name).trains_fresh
        profile = state.profile_of(found, choice, fresh=fresh)
        next_profile = state.next_profile_of(found, choice, fresh=fresh)
        return Proposal(tuple(found.fresh), profile, next_profile, tuple(known.names_found), tuple(known.names_made))

    def _together(self, strategies: Sequence[Strategy], before: Proposals, *, only: bool) -> Proposals:
        """Measure what strategies still need in this process."""
        workload, chain, hardware = self.question.workload, self.question.chain, self.question.hardware
        with self.measuring.limit.allow_address_space(META_PASS_BYTES):
            reasons = {s.name: _reasons(s, workload, chain, hardware, only=only) for s in strategies}
            prepared = [_prepared(each, workload, chain) for each in strategies if not reasons[each.name]]
            network = description(workload, chain)
            made = [each.probes(workload, chain, hardware) for each in prepared]
            able: list[Prober] = [
                (strategy, [identified(probe, strategy, workload, network) for probe in probes])
                for strategy, probes in zip(prepared, made, strict=True)
            ]
        profile = merged(before.profile, self.measuring.profile([probe for _, probes in able for probe in probes]))
        refused = [Candidate(name, False, reasons=tuple(words)) for name, words in reasons.items() if words]
        refused, able = [*before.refused, *refused], [*before.able, *able]
        with self.measuring.limit.allow_address_space(META_PASS_BYTES):
            profile = replace(profile, units=unit_stats(chain))
            here, fresh = list(refused), list(refused)
            for strategy, probes in able:
                own = alone(profile, probes)
                found = self._candidates(strategy, without_others(profile, probes), own)
                here += found
                if self.resting_bytes is None:
                    continue
                if find_config(strategy.name).trains_fresh:
                    found = self._candidates(strategy, in_fresh_process(profile, probes, self.resting_bytes), own)
                fresh += found
        return Proposals(here, fresh, refused, able, profile, before.apart)

    def _candidates(self, strategy: Strategy, profile: Profile, own: Profile) -> list[Candidate]:
        workload, hardware, budget = self.question.workload, self.question.hardware, self.question.budget
        factors = correction(self.runs, strategy.name, workload)
        profile, own = self._as_trained(profile), self._as_trained(own)
        return candidates_of(strategy, workload, profile, hardware, budget, factors, own)

    def _as_trained(self, profile: Profile) -> Profile:
        """The profile with the seconds of training, which keeps freed memory unless memory is the aim."""
        question = self.question
        return profile if question.aim == "memory" else with_kept_seconds(profile, question.budget, question.free_bytes)

    def profile_of(self, proposals: Proposals, choice: Candidate | None, *, fresh: bool) -> Profile:
        """The profile of the process that trains the choice, ``fresh`` or this one."""
        if choice is not None and choice.strategy in proposals.apart:
            return proposals.with_others(proposals.apart[choice.strategy].profile)
        probes = proposals.probes_of(choice)
        if probes is None:
            return proposals.measured
        if fresh and self.resting_bytes is not None:
            return self._as_trained(in_fresh_process(proposals.profile, probes, self.resting_bytes))
        return self._as_trained(without_others(proposals.profile, probes))

    def next_profile_of(self, proposals: Proposals, choice: Candidate | None, *, fresh: bool) -> Profile:
        """The same where a process finds these measurements in the cache."""
        if choice is not None and choice.strategy in proposals.apart:
            return proposals.with_others(proposals.apart[choice.strategy].next_profile)
        probes = proposals.probes_of(choice)
        if probes is None or fresh:
            return self.profile_of(proposals, choice, fresh=fresh)
        return self._as_trained(in_next_process(proposals.profile, probes))

    def has_more_room(self, proposals: Proposals, choice: Candidate | None) -> bool:
        """Whether a fresh process has more memory for a choice, kernels of a batch size included."""
        if choice is None or not find_config(choice.strategy).trains_fresh:
            return False
        here, fresh = (self.profile_of(proposals, choice, fresh=each) for each in (False, True))
        kernels = max((line.shape_bytes for line in fresh.lines.values()), default=0.0)
        return fresh.base_bytes + kernels < here.base_bytes

    def may_fit_alone(self, plan: Plan) -> tuple[str, ...]:
        """Strategies that were refused, and may fit where no other one was measured, if the choice trains for long.

        A strategy whose measurements were refused has an estimate of its smallest budget, and no time.
        """
        choice, budget = plan.choice, plan.budget.memory_bytes
        if budget is None or choice is None or choice.predicted is None or choice.predicted.seconds < LONG_SECONDS:
            return ()
        fitting = {each.strategy for each in plan.candidates if each.feasible}
        refused = (each for each in plan.candidates if each.strategy not in fitting and each.smallest_bytes is not None)
        near = (each.strategy for each in refused if (each.smallest_bytes or 0) <= NEAR * budget)
        return tuple(dict.fromkeys(near))


def _prepared(strategy: Strategy, workload: Workload, chain: Chain) -> Strategy:
    """The strategy with what it must know of the model before it is measured, if it defines ``prepared``."""
    prepared = getattr(strategy, "prepared", None)
    made: Strategy = strategy if prepared is None else prepared(workload, chain)
    return made


def _reasons(strategy: Strategy, workload: Workload, chain: Chain, hardware: Hardware, *, only: bool) -> list[str]:
    """Why a strategy does not support the model; raises ModelError if it is the ``only`` one."""
    try:
        return strategy.validate(workload, chain, hardware)
    except ModelError as error:
        if only:
            raise
        return [str(error)]


def _start_threads(limit: MemoryLimit) -> None:
    """Start torch's threads again, which ended before a fork: their stacks may be more than the limit leaves."""
    count = torch.get_num_threads()
    with limit.allow_address_space(count * MOST_STACK_BYTES):
        torch.zeros(count * GRAIN, dtype=torch.uint8).add_(1)
