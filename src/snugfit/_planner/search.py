"""From strategies and a budget to a plan: measure probes, collect proposals, rank those that fit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from snugfit._chain import Chain
from snugfit._core.budget import Aim, Budget
from snugfit._core.explanation import TOO_LATE, explanation_of
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Candidate, Correction, Plan, ranked
from snugfit._core.profile import Profile
from snugfit._core.registry import config_of, find_config
from snugfit._core.serial import to_data
from snugfit._core.workload import Workload
from snugfit._planner.calibration import PastRun, corrected, correction
from snugfit._quantities import format_bytes
from snugfit._training.strategy import Strategy
from snugfit.errors import MEMORY_ERRORS, ModelError
from snugfit.memory import MemoryLimit, PeakMeter, is_out_of_memory, release_memory
from snugfit.profiling import (
    META_PASS_BYTES,
    Measurements,
    Probe,
    alone,
    describe,
    in_fresh_process,
    in_next_process,
    measure_probes,
    unit_stats,
    without_others,
)

if TYPE_CHECKING:
    from snugfit.profiling import TensorProbe

LONG_SECONDS = 600.0
"""Predicted seconds of a run from which a refused strategy is measured again in a process of its own."""
NEAR = 1.65
"""Largest ratio of what a refused strategy is expected to need to the budget; such a one fitted alone."""
Measured = TypeVar("Measured", Probe, "TensorProbe")
_Prober = tuple[Strategy, Sequence["Probe | TensorProbe"]]
"""A strategy with its probes."""


@dataclass(frozen=True)
class PlanningInput:
    """What a plan is made for; the chain is on the meta device, and the aim ranks candidates.

    Attributes:
        compares: whether strategies are measured, too, that cannot be chosen if the one to fine-tune with fits.
        profile_seconds: how long measuring may go on before strategies that were not measured are left out, if another
            one fits; all are measured if None.
        fresh: whether training may run in another process than measuring, which leaves memory behind.
    """

    workload: Workload
    chain: Chain
    hardware: Hardware
    budget: Budget
    aim: Aim = "time"
    compares: bool = True
    fresh: bool = False
    profile_seconds: float | None = None


@dataclass(frozen=True)
class StrategySelection:
    """The strategies of a plan, with the user's settings.

    Attributes:
        strategies: strategies that propose candidates.
        standby: strategies that propose only if nothing else fits; if the aim is not time, only if nothing exact fits.
        left_out: names of excluded strategies, with reasons.
    """

    strategies: Sequence[Strategy]
    standby: Sequence[Strategy] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        plan: feasible candidates first, the best of them first.
        profile: that of a process that trains the choice.
        next_profile: the same if the process finds these measurements in the cache.
        fresh: whether the choice trains in a fresh process, because memory that measuring left changes it.
        may_fit_alone: refused strategies that may fit where no other one was measured.
    """

    plan: Plan
    profile: Profile
    next_profile: Profile
    fresh: bool = False
    may_fit_alone: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeasurementContext:
    """How probes are measured.

    ``on_measured`` is called with every measured probe; None measures nothing, so nothing is feasible. New measurements
    are added to ``known`` ones.
    """

    meter: PeakMeter
    limit: MemoryLimit
    on_measured: Callable[[str, int, int], object] | None
    known: Measurements = field(default_factory=Measurements)

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

    Raises:
        ModelError: the only strategy finds the model unusable.
    """
    state, aim = _Search.of(question, measuring, runs), question.aim
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
    plan, fresh = (_ranked_plan(question, [*each, *rest]) for each in (proposals.candidates, proposals.fresh))
    is_fresh = _changes_choice(plan, fresh) and state.has_more_room(proposals, fresh.choice)
    plan = fresh if is_fresh else plan
    return SearchResult(
        replace(plan, explanation=explanation_of(plan)),
        state.profile_of(proposals, plan.choice, fresh=is_fresh),
        state.next_profile_of(proposals, plan.choice, fresh=is_fresh),
        is_fresh,
        state.may_fit_alone(plan),
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


@dataclass(frozen=True)
class _Proposals:
    """Candidates, strategies that support the model with their probes, and the profile.

    ``fresh`` are the candidates of a process in which nothing was measured; without a budget there are none.
    """

    candidates: list[Candidate]
    fresh: list[Candidate]
    refused: list[Candidate]
    able: list[_Prober]
    profile: Profile

    @property
    def everywhere(self) -> list[Candidate]:
        """All candidates, in either process."""
        return [*self.candidates, *self.fresh]


@dataclass(frozen=True)
class _Search:
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
    def of(cls, question: PlanningInput, measuring: MeasurementContext, runs: Sequence[PastRun]) -> _Search:
        """The search, before anything is measured."""
        budget = question.budget
        fresh = question.fresh and budget.devices == 1 and question.hardware.device == "cpu"
        resting = measuring.resting_bytes() if fresh and budget.memory_bytes is not None else None
        return cls(question, measuring, runs, resting, time.monotonic())

    def propose_in_time(
        self, strategies: Sequence[Strategy], before: _Proposals | None = None
    ) -> tuple[_Proposals, Sequence[Strategy]]:
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
        self, strategies: Sequence[Strategy], before: _Proposals | None = None, *, only: bool = False
    ) -> _Proposals:
        """Measure what strategies still need; earlier strategies propose again with the remaining headroom."""
        workload, chain, hardware = self.question.workload, self.question.chain, self.question.hardware
        known = Profile(()) if before is None else before.profile
        with self.measuring.limit.allow_address_space(META_PASS_BYTES):
            reasons = {s.name: _reasons(s, workload, chain, hardware, only=only) for s in strategies}
            prepared = [_prepared(each, workload, chain) for each in strategies if not reasons[each.name]]
            network = _description(workload, chain)
            made = [each.probes(workload, chain, hardware) for each in prepared]
            able: list[_Prober] = [
                (strategy, [_identified(probe, strategy, workload, network) for probe in probes])
                for strategy, probes in zip(prepared, made, strict=True)
            ]
        profile = _merged(known, self.measuring.profile([probe for _, probes in able for probe in probes]))
        refused = [Candidate(name, False, reasons=tuple(words)) for name, words in reasons.items() if words]
        if before is not None:
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
        return _Proposals(here, fresh, refused, able, profile)

    def _candidates(self, strategy: Strategy, profile: Profile, own: Profile) -> list[Candidate]:
        workload, hardware, budget = self.question.workload, self.question.hardware, self.question.budget
        factors = correction(self.runs, strategy.name, workload)
        return candidates_of(strategy, workload, profile, hardware, budget, factors, own)

    def profile_of(self, proposals: _Proposals, choice: Candidate | None, *, fresh: bool) -> Profile:
        """The profile of the process that trains the choice, ``fresh`` or this one."""
        probes = _probes_of(proposals, choice)
        if probes is None:
            return proposals.profile
        if fresh and self.resting_bytes is not None:
            return in_fresh_process(proposals.profile, probes, self.resting_bytes)
        return without_others(proposals.profile, probes)

    def next_profile_of(self, proposals: _Proposals, choice: Candidate | None, *, fresh: bool) -> Profile:
        """The same where a process finds these measurements in the cache."""
        probes = _probes_of(proposals, choice)
        if probes is None or fresh:
            return self.profile_of(proposals, choice, fresh=fresh)
        return in_next_process(proposals.profile, probes)

    def has_more_room(self, proposals: _Proposals, choice: Candidate | None) -> bool:
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


def _probes_of(proposals: _Proposals, choice: Candidate | None) -> Sequence[Probe | TensorProbe] | None:
    """The probes of a choice's strategy; None without a choice, or if its strategy refuses the model."""
    return next((made for each, made in proposals.able if choice and each.name == choice.strategy), None)


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


def _description(workload: Workload, chain: Chain) -> str:
    """What a network computes, as text; empty if no text describes it.

    That is so with a loss or optimizer from Python, and for the forward pass of a network without a graph.
    """
    if "python" in (workload.loss, workload.optimizer.name) or chain.undivided:
        return ""
    return "\n".join(describe(unit.module) for unit in chain.all_units)


def _identified(probe: Measured, strategy: Strategy, workload: Workload, network: str) -> Measured:
    """Return the probe with a key of everything that its measurement depends on, except the machine.

    On one machine, measurements with equal keys are interchangeable. The probe's own key, if any, replaces the
    description of the network. Counts of images, epochs, seed and learning rate are not part of the key. Without a
    ``network``, it has no key, and is measured in every plan.
    """
    if not network:
        return replace(probe, same="")
    part = probe.same or f"{probe.name}\n{network}"
    optimizer = workload.optimizer
    settings = {
        "strategy": strategy.name,
        "settings": to_data(strategy),
        "work": {
            "input": workload.input_shape,
            "classes": workload.classes,
            "precision": workload.precision,
            "activations": workload.activations,
            "weights": workload.weight_dtype,
            "optimizer": (optimizer.name, optimizer.momentum > 0, optimizer.weight_decay > 0, optimizer.state),
            "averaged": optimizer.ema is not None,
            "task": (workload.task, workload.anchors, workload.most_boxes),
            "smoothed": workload.label_smoothing > 0,
            "weighted": bool(workload.class_weights),
            "loss": workload.loss,
            "clipped": workload.clip_norm is not None,
            "mixed": workload.mixed,
        },
        "limit": probe.batch_limit,
        "sizes": probe.sizes if isinstance(probe, Probe) else (),
    }
    return replace(probe, same=f"{json.dumps(settings, sort_keys=True)}\n{part}")


def _merged(known: Profile, more: Profile) -> Profile:
    """Merge two profiles of one process."""
    expected = {**known.expected, **more.expected}
    resting = max(known.base_bytes - sum(known.expected.values()), more.base_bytes - sum(more.expected.values()))
    return replace(
        more,
        lines={**known.lines, **more.lines},
        floors={**known.floors, **more.floors},
        kept={**known.kept, **more.kept},
        base_bytes=resting + sum(expected.values()),
        start_bytes=known.start_bytes if known.floors else more.start_bytes,
        left={**known.left, **more.left},
        expected=expected,
        seconds=known.seconds + more.seconds,
        tensors=more.tensors or known.tensors,
    )


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


def candidates_of(
    strategy: Strategy,
    workload: Workload,
    profile: Profile,
    hardware: Hardware,
    budget: Budget,
    factors: Correction,
    own: Profile | None = None,
) -> list[Candidate]:
    """A strategy's proposals within a budget, or the reason for none.

    ``factors`` correct its predictions. Its smallest budget follows from the profile of its ``own`` probes, if given.
    """
    candidates = []
    memory = None if budget.memory_bytes is None else int(budget.memory_bytes / factors.peak)
    for proposal in strategy.propose(workload, profile, hardware, replace(budget, memory=memory)):
        cost = corrected(proposal.estimate(workload, profile, hardware), factors)
        too_big = _too_much(budget.memory_bytes, cost.peak_bytes)
        reasons = [f"needs {format_bytes(cost.peak_bytes)} of memory"] if too_big else []
        if _too_much(budget.storage_bytes, cost.storage_bytes):
            reasons.append(f"needs {format_bytes(cost.storage_bytes)} of storage")
        if _too_much(budget.host_memory_bytes, cost.host_bytes):
            reasons.append(f"needs {format_bytes(cost.host_bytes)} of host memory")
        exact = proposal.exact and not workload.compresses
        candidate = Candidate(strategy.name, not reasons, to_data(proposal), cost, tuple(reasons), exact=exact)
        fine_tunes = workload.fine_tunes_few and find_config(strategy.name).fine_tunes
        smallest = cost.peak_bytes if too_big else None
        few = norm_images(candidate, workload, profile)
        candidate = replace(candidate, smallest_bytes=smallest, correction=factors, norm_images=few)
        candidates.append(replace(candidate, fine_tunes=fine_tunes))
    if not candidates:
        lack = strategy.shortfall(workload, own or profile, hardware, budget)
        exact = strategy.exact and not workload.compresses
        candidate = Candidate(strategy.name, False, to_data(strategy), reasons=lack.reasons, exact=exact)
        candidates = [replace(candidate, smallest_bytes=lack.smallest_bytes, smallest_ratio=lack.smallest_ratio)]
    return candidates


def norm_images(candidate: Candidate, workload: Workload, profile: Profile) -> int | None:
    """Images that batch norms normalise together, where a candidate's ``norm_images`` names them."""
    images, settings = min(candidate.batches, default=0), candidate.settings
    if settings.get("whole_batch"):  # all images of a step, whatever its micro-batches
        images = workload.step_images(int(settings["micro_batch"]), int(settings["micro_batches"]))
    fewer = candidate.exact and 0 < images < workload.effective_batch
    return images if fewer and any(unit.tracks for unit in profile.units) else None


def _too_much(budget_bytes: int | None, needed_bytes: int) -> bool:
    return budget_bytes is not None and needed_bytes > budget_bytes
