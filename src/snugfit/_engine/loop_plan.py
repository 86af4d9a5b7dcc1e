"""Plan a caller's own training loop: micro-batch and recomputation within a memory budget, by measured steps."""

from __future__ import annotations

import copy
import math
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from snugfit._chain import Chain, on_meta_or
from snugfit._chain.store import copy_empty
from snugfit._core.budget import Budget
from snugfit._core.inputs import Input
from snugfit._core.machine_memory import machine_memory, private_bytes
from snugfit._core.option_groups import FROM_PYTHON
from snugfit._core.parts import largest_parts, part_sizes
from snugfit._core.profile import ProbeLine, Profile
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._engine.loop_trainer import LoopNetwork, LoopTrainer, TrialSteps, parts_of
from snugfit._planner import MeasurementContext
from snugfit._quantities import MB, format_bytes
from snugfit._training.dry_run import SPARE_BYTES, smaller_batch_sizes
from snugfit.errors import MEMORY_ERRORS, BudgetExceededError, InfeasibleBudgetError, SnugfitError
from snugfit.memory import MemoryLimit, PeakMeter, is_out_of_memory, release_memory, tensor_peak_bytes
from snugfit.memory.address_space import KERNEL_BYTES
from snugfit.memory.freed_memory import (
    LOOP_GROWTH,
    OBSERVED_STEPS,
    FreedMemory,
    fillable_bytes,
    kept_peak,
    room_bytes,
)
from snugfit.profiling import META_PASS_BYTES, Probe, unit_stats
from snugfit.profiling.measuring import FIRST_GROWTH
from snugfit.strategies.checkpoint.candidates import (
    Candidate,
    MeasurementFilter,
    fastest_schedule,
    find_candidates,
    schedule_of_probe,
    schedule_probes,
)
from snugfit.strategies.full_network import LONGEST_STEP_SECONDS, PLAIN_PROBE
from snugfit.strategies.memory_estimates import DRIFT_BYTES, require_images, smallest_budget, weight_layers, with_safety
from snugfit.strategies.micro_batch import MicroBatching, hold_modes, line_name, step_lines
from snugfit.strategies.recomputation.module_costs import reasons_against_modules
from snugfit.strategies.recomputation.schedule import AnySchedule

NAMED_BYTES = 100_000
"""To multiples of which the smallest budget is rounded up."""
LOADED_BATCHES = 2
"""Batches that a loader has in memory while it makes the next one of its images, besides the one in use."""


@dataclass(frozen=True)
class LoopPlan:
    """How a loop's steps are computed.

    Attributes:
        micro_batch: most images in memory at once; a batch is divided into ``micro_batches``.
        batch_size: images of a whole batch.
        recomputation: units or modules that are computed again, as their schedule prints; empty if none are.
        predicted_bytes: upper bound of the peak above the baseline.
        kept_bytes: what of it is freed memory that the heap keeps within a step, for speed, unless the loop needs it.
        kept_between: whether the heap keeps it between steps, too.
    """

    micro_batch: int
    micro_batches: int
    batch_size: int
    recomputation: str
    predicted_bytes: int
    kept_bytes: int = 0
    kept_between: bool = False

    def with_kept_memory(self, limit: MemoryLimit, between: bool | None) -> LoopPlan:
        """The plan with the peak that keeping freed memory may lead to within the limit; unchanged on a GPU.

        Args:
            limit: the memory limit.
            between: whether freed memory is kept between steps, too; by default if there is room for all of it and for
                another step, so that validation has as much as a step.
        """
        if limit.device.type != "cpu":
            return self
        free, least = machine_memory(private_bytes()).free_bytes, self.predicted_bytes
        peak = kept_peak(least, limit.budget_bytes, free, LOOP_GROWTH)
        if between is None:
            between = room_bytes(limit.budget_bytes, free) >= (LOOP_GROWTH + 1) * least
        return replace(self, predicted_bytes=peak, kept_bytes=peak - least, kept_between=between)

    def freed_memory(self, meter: PeakMeter, limit: MemoryLimit, observed: int = OBSERVED_STEPS) -> FreedMemory:
        """What keeps freed memory below the predicted peak, after ``observed`` steps that keep none; never on a GPU.

        It checks layers in every step, since no bound of the growth is known where a library validates between steps.
        """
        freed = FreedMemory(meter, limit)
        allowed = fillable_bytes(self.predicted_bytes) if limit.device.type == "cpu" else 0
        freed.begin(allowed, self.kept_bytes, observed, math.inf)
        return freed


def infeasible(name: str, budget_bytes: int, smallest_bytes: int) -> InfeasibleBudgetError:
    """The error of a network that fits no budget below ``smallest_bytes``; 0 if the machine has less memory left."""
    return InfeasibleBudgetError(
        f"{name} does not fit memory={format_bytes(budget_bytes)}, whatever the micro-batch."
        + ("" if smallest_bytes else " Neither does it fit the memory that this machine has left."),
        closest="the smallest micro-batch",
        lacking_bytes=max(smallest_bytes - budget_bytes, 0),
        smallest_bytes=smallest_bytes,
    )


def wider_limits(limit: MemoryLimit, least_bytes: int = 0) -> Iterator[MemoryLimit]:
    """Limits in force: twice the budget, or ``least_bytes`` if more, then doubled up to the machine's free memory."""
    budget, most = max(limit.budget_bytes or 0, least_bytes), machine_memory(private_bytes()).free_bytes
    while budget < most:
        budget = min(2 * budget, most)
        release_memory()
        with MemoryLimit(budget, limit.baseline, limit.device) as wider:
            yield wider


@contextmanager
def planning(batch_size: int, limit: MemoryLimit) -> Iterator[None]:
    """Context for planning a loop, whose errors keep no tensors alive: a caller may try again while it handles them.

    Raises:
        BudgetExceededError: memory is refused outside of the steps that are tried, such as for the example.
    """
    try:
        yield
        return
    except (SnugfitError, *MEMORY_ERRORS) as error:
        is_refused = is_out_of_memory(error)
        if is_refused or isinstance(error, SnugfitError):
            traceback.clear_frames(error.__traceback__)
            release_memory()
        if not is_refused:
            raise
    raise BudgetExceededError(
        f"an example of {batch_size} images was refused memory within memory={format_bytes(limit.budget_bytes or 0)}. "
        "Use a larger memory= or smaller batches."
    )


def step_workload(
    model: nn.Module,
    shape: tuple[int, int, int],
    batch_size: int,
    optimizer: OptimizerSettings,
    inputs: tuple[Input, ...] = (),
) -> Workload:
    """A workload of one step on a batch of images (C, H, W), or of the values (1, 1, N) of several inputs."""
    return Workload(
        model=type(model).__name__,
        data=FROM_PYTHON,
        input_shape=shape,
        classes=1,
        train_count=batch_size,
        val_count=0,
        test_count=0,
        epochs=1,
        batch_size=batch_size,
        optimizer=optimizer,
        loss="python",
        inputs=inputs,
    )


def on_meta(model: nn.Module) -> nn.Module:
    """A copy on the meta device, in float32, without allocating memory."""
    return copy_empty(model, model, "meta").float()


class LoopPlanner:
    """Measures steps of a network on a batch (B, ...) and its targets (B, ...), within a limit that is in force."""

    def __init__(
        self,
        network: LoopNetwork,
        workload: Workload,
        batch: tuple[Tensor, Tensor],
        limit: MemoryLimit,
        meter: PeakMeter,
    ) -> None:
        self.network, self.workload, self.limit, self.meter = network, workload, limit, meter
        self.images, self.targets = batch
        self.trials = TrialSteps(network)
        with limit.allow_address_space(META_PASS_BYTES):
            self.meta = Chain.from_any_module(on_meta(network.model), workload.input_shape, inputs=workload.inputs)
        given = sum(each.values * getattr(torch, each.dtype).itemsize for each in workload.inputs)  # by the loop itself
        self.held = self.images.nbytes + self.targets.nbytes + len(self.images) * given
        self.budget_bytes = limit.budget_bytes or 0
        self.leanest = False
        """Whether only the schedule with the least memory is measured, which a small budget measures first."""

    def plan(self) -> LoopPlan:
        """Choose the fastest way that fits, and try it.

        Raises:
            InfeasibleBudgetError: no micro-batch fits the budget, even with recomputation.
            BudgetExceededError: it was predicted to fit, and is refused memory.
        """
        try:
            with torch.random.fork_rng(devices=[self.images.device] if self.images.is_cuda else []):
                profile = self._measured()
                probe, micro = self._choice(profile)
                return self._tried(profile, probe, micro)
        finally:
            self.trials.clear()

    def _measured(self) -> Profile:
        with self.limit.allow_address_space(META_PASS_BYTES):
            probes = list(self._probes())
            units = unit_stats(self.meta)
        found = MeasurementContext(self.meter, self.limit, lambda *_: None).profile(probes)
        self.trials.clear()
        return replace(found, units=units)

    def _choice(self, profile: Profile) -> tuple[str, MicroBatching]:
        """Probe and micro-batches of the fastest way; its first batch of another size may come when state exists."""
        found = self._fastest(profile, self.budget_bytes)
        if found is None:
            with self.limit.allow_address_space(META_PASS_BYTES):  # nothing may be left of the budget
                smallest = self._smallest_bytes(profile)
            raise infeasible(self.workload.model, self.budget_bytes, smallest)
        return found

    def _fastest(self, profile: Profile, budget_bytes: int) -> tuple[str, MicroBatching] | None:
        """The same within any budget, by what was measured; None if a whole batch does not fit."""
        weights = 4 * sum(unit.trained for unit in profile.units)
        state = int(weights * self.workload.optimizer.state_per_parameter)
        budget = Budget(max(budget_bytes - self.held - min(state, KERNEL_BYTES), 1))
        names = schedule_probes(profile.floors)
        found = fastest_schedule(names, self.workload, profile, budget, accumulate=True)
        if found is None or found[1].images(self.workload) < self.workload.batch_size:
            return None
        return found if self._predicted(profile, *found) <= budget_bytes else None

    def _fits(self, profile: Profile, budget_bytes: int) -> bool:
        return self._fastest(profile, budget_bytes) is not None

    def _smallest_bytes(self, before: Profile) -> int:
        """Smallest budget by steps measured in a larger one; 0 if the machine has less memory left.

        The first limit follows from floors of ``before``, so that budgets below it name the same.
        """
        least = smallest_budget(before, min(before.floors.values()) + self.held)
        for limit in wider_limits(self.limit, least):
            wider = copy.copy(self)
            wider.limit, wider.budget_bytes, wider.leanest = limit, limit.budget_bytes or 0, True
            profile, sizes = wider._measured(), range(0, wider.budget_bytes + 1, NAMED_BYTES)
            found = bisect_left(sizes, True, key=lambda size: self._fits(profile, size))
            if found < len(sizes):
                return max(sizes[found] + DRIFT_BYTES, self.budget_bytes + MB)
        return 0

    def _predicted(self, profile: Profile, probe: str, micro: MicroBatching) -> int:
        """Peak of a step, or of loading the next batch."""
        step = micro.step_bytes(step_lines(profile.lines, probe)[micro.line(probe)], self.workload)
        return with_safety(profile.base_bytes + self.held, max(step, LOADED_BATCHES * self.held))

    def _tried(self, profile: Profile, probe: str, micro: MicroBatching) -> LoopPlan:
        """The plan of the largest micro-batch whose step is not refused memory, which also generates its kernels."""
        batch, schedule = self.workload.batch_size, self._schedule(probe)
        smallest = profile.lines[micro.line(probe)].smallest_batch
        sizes = [micro.micro_batch, *smaller_batch_sizes(micro.micro_batch, smallest)]
        predicted = self._predicted(profile, probe, micro)
        for parts in dict.fromkeys(-(-batch // size) for size in sizes if batch // -(-batch // size) >= smallest):
            release_memory()
            if self._runs(schedule, part_sizes(batch, parts)):
                text = str(schedule) if schedule.recomputes else ""
                return LoopPlan(-(-batch // parts), parts, batch, text, predicted)
        raise BudgetExceededError(
            f"{self.workload.model} needs more than memory={format_bytes(self.budget_bytes)} at every micro-batch, "
            "although it was predicted to fit. Use a larger memory=."
        )

    def _runs(self, schedule: AnySchedule, sizes: tuple[int, ...]) -> bool:
        """Whether a step on the largest and the smallest part of a batch gets the memory that it needs."""
        tried = (sizes[0], sizes[-1])[: len(sizes)]
        images, targets = self.images[: sum(tried)], self.targets[: sum(tried)]
        try:
            with self.limit.reserve(SPARE_BYTES), self.limit.allow_kernels():
                self.trials.trainer(schedule, len(sizes) > 1).step(parts_of(images, targets, tried))
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self.trials.clear()
        return True

    def _schedule(self, probe: str) -> AnySchedule:
        return schedule_of_probe(probe, len(self.meta.all_units))[0]

    def _probes(self) -> Iterator[Probe]:
        """A step without recomputation, and by each schedule that may be worth measuring, if units may run twice."""
        if self._runs_whole:
            yield from (self._probe(PLAIN_PROBE, hold) for hold in self._modes)
            return
        own = sum(unit.weight_bytes for unit in self.meta.all_units)  # they are in memory
        found = find_candidates(self.meta, unit_stats(self.meta), self.workload)
        candidates = [replace(each, fixed_bytes=each.fixed_bytes - own) for each in found]
        if self.leanest:
            yield from (self._probe(candidates[-1].probe, hold) for hold in self._modes)
            return
        left = FIRST_GROWTH + 2 * self._probe(PLAIN_PROBE, False).growth_bytes
        judge = MeasurementFilter(candidates, self.workload, len(self._modes) > 1, left)
        for candidate in candidates:
            for hold in self._modes:
                yield replace(self._probe(candidate.probe, hold), needed=self._needed(judge, candidate, hold))

    @property
    def _runs_whole(self) -> bool:
        """Whether no unit, or no module, can be computed again."""
        if self.network.chain.undivided:
            return bool(reasons_against_modules(self.meta))
        return bool(self.meta.reasons_against_units(recomputed=True))

    @property
    def _modes(self) -> tuple[bool, ...]:
        """Whether steps hold gradients: never for a batch of one image."""
        return hold_modes(self.workload.batch_size > 1)

    def _needed(
        self, judge: MeasurementFilter, candidate: Candidate, hold: bool
    ) -> Callable[[Mapping[str, ProbeLine | None], float], bool]:
        """Whether a schedule is worth measuring, where a loop holds a batch."""
        return lambda tried, available: judge.is_worth_measuring(candidate, hold, tried, available - self.held)

    def _probe(self, name: str, hold: bool) -> Probe:
        """The probe of a step in place; one that holds gradients has two micro-batches."""
        limit, schedule = self.workload.batch_size, self._schedule(name)

        def build() -> Callable[[int], object]:
            trainer = self.trials.trainer(schedule, hold)
            return lambda batch: trainer.step([(self.images[:batch], self.targets[:batch])] * (1 + hold))

        return Probe(
            line_name(name, hold=hold),
            build,
            lambda batch: self._floor(schedule, batch, hold),
            limit,
            sizes=largest_parts(limit)[:-1] if hold else (),
            layers=weight_layers(self.meta),
            longest_seconds=LONGEST_STEP_SECONDS,
        )

    def _floor(self, schedule: AnySchedule, batch: int, hold: bool) -> int:
        """Tensor bytes that two steps add to the weights, counted on the meta device."""
        chain = copy.deepcopy(self.meta)
        model = chain.to_module()
        require_images(batch, self.workload.batch_size, self.network.model)
        network = replace(self.network, model=model, chain=chain, loss=lambda outputs, _: outputs.sum())
        trainer = LoopTrainer(network, chain, schedule, holds=hold)
        own = sum(unit.weight_bytes for unit in chain.all_units)
        images = torch.empty((batch, *self.workload.input_shape), device="meta")

        def step() -> Tensor:
            return trainer.step([(images, images)] * (1 + hold))

        def count() -> int:
            return tensor_peak_bytes(step, trainer.modules, repeats=2) - own

        counted = on_meta_or(count, 0, whole=bool(chain.undivided))
        itemsize = next(self.network.model.parameters()).element_size()
        return counted * itemsize // torch.float32.itemsize
