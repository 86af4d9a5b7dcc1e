"""Plan the training loop of another library, by measured steps: images in memory at once, and recomputation."""

from __future__ import annotations

import copy
import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from snugfit._chain.python_state import restored
from snugfit._core.profile import ProbeLine, Profile
from snugfit._engine.kept_values import values_kept
from snugfit._engine.loop_plan import LOADED_BATCHES, LoopPlan, infeasible, wider_limits
from snugfit._engine.loop_trainer import set_to_zero
from snugfit._planner import MeasurementContext
from snugfit._quantities import MB, format_bytes
from snugfit._training.dry_run import SPARE_BYTES
from snugfit.errors import MEMORY_ERRORS, BudgetExceededError, InfeasibleBudgetError, UsageError
from snugfit.memory import MemoryLimit, PeakMeter, is_out_of_memory, release_memory
from snugfit.profiling import META_PASS_BYTES, Probe
from snugfit.strategies.memory_estimates import DRIFT_BYTES, RESERVED_BYTES, require_images, with_safety
from snugfit.strategies.micro_batch import divisors

Needed = Callable[[Mapping[str, ProbeLine | None], float], bool]
"""Whether a schedule is worth measuring; see :class:`snugfit.profiling.Probe`."""
States = Sequence[dict[str, Any]]
"""What optimizers keep of each parameter, by name, on the meta device."""
KEEPING = ""
"""The schedule that recomputes nothing."""


class Recomputation(Protocol):
    """How a library's forward pass computes feature maps again."""

    @property
    def schedules(self) -> Sequence[str]:
        """Those to consider, next to :data:`KEEPING`, as a record shows them."""

    def use(self, schedule: str) -> None:
        """Change the forward pass from now on."""


@dataclass(frozen=True)
class LibraryStep:
    """A training step of a library's loop.

    Attributes:
        module: what it trains.
        optimizers: the library's own.
        passes: forward and backward pass over so many images of an example batch; gradients add up.
        recomputation: how its forward pass can recompute.
        held_bytes: of the example batch.
        between: bytes that the loop allocates between two steps, such as copies for a checkpoint, for so many images at
            once; besides weights and the optimizers' states, which it is given.

    Raises:
        UsageError: an optimizer computes the loss itself, as often as it likes.
    """

    module: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    passes: Callable[[int], object]
    recomputation: Recomputation
    held_bytes: int
    between: Callable[[int, States], int] = lambda images, states: 0

    def __post_init__(self) -> None:
        for each in self.optimizers:
            closure = inspect.signature(type(each).step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise UsageError(f"a memory budget cannot plan {type(each).__name__}, whose step needs a closure.")

    def trial(self, schedule: str, seen: Callable[[States], object] = lambda _: None) -> Callable[[int], None]:
        """A step with two micro-batches of a size, by optimizers of its own, with a learning rate of zero.

        ``seen`` is called with the states that it leaves.
        """
        self.recomputation.use(schedule)
        twins = [_twin(each) for each in self.optimizers]

        def step(images: int) -> None:
            try:
                for _ in range(2):
                    self.passes(images)
                for twin in twins:
                    twin.step()
            finally:
                self.module.zero_grad()
            kept = [state for twin in twins for state in twin.state.values()]
            seen(tree_map_only(Tensor, lambda tensor: tensor.to("meta"), kept))

        return step

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Trials inside change neither weights, nor what layers hold besides, nor random numbers; no gradient is left.

        Gradients are set to zero before they are applied: times a rate of zero, an infinite one would be NaN. An
        optimizer may still change weights, as may a step itself.

        Raises:
            OutOfStorageError: there is no room for a file of the weights.
        """
        trained = [each for each in self.module.parameters() if each.requires_grad]
        handles = [each.register_post_accumulate_grad_hook(set_to_zero) for each in trained]
        devices = {each.device for each in trained if each.is_cuda}
        with values_kept(self.module.parameters()), restored(self.module), drawing_nothing(devices):
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
                self.module.zero_grad()
                self.recomputation.use(KEEPING)


@contextmanager
def drawing_nothing(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Random numbers of torch (of the CPU and these devices), Python and numpy are afterwards as they were."""
    python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same parameters and settings, with a learning rate of zero and a state of its own."""
    twin = copy.copy(optimizer)  # without attributes of a class of the user's own, and without a scheduler's ``step``
    vars(twin).update({key: value for key, value in vars(optimizer).items() if key not in {*vars(twin), "step"}})
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    return twin


class StepPlanner:
    """Measures a library's step within a limit that is in force.

    A batch is divided into equal micro-batches, because libraries weight all of them alike.
    """

    def __init__(self, step: LibraryStep, batch_size: int, limit: MemoryLimit, meter: PeakMeter) -> None:
        self.step, self.batch_size, self.limit, self.meter = step, batch_size, limit, meter
        self.budget_bytes = limit.budget_bytes or 0
        self.states: States = []

    def plan(self) -> LoopPlan:
        """Choose the fastest way that fits, and try it.

        Raises:
            InfeasibleBudgetError: no micro-batch fits the budget, even with recomputation.
            BudgetExceededError: it was predicted to fit, and is refused memory.
        """
        with self.step.unchanged():
            profile = self._measured(self._may_help)
            found = sorted(self._fitting(profile))
            if not found:
                raise self._infeasible(profile)
            _, parts, schedule = found[0]
            return self._tried(profile, parts, schedule)

    def _measured(self, needed: Needed | None = None) -> Profile:
        probes = [self._probe(KEEPING), *(self._probe(each, needed) for each in self.step.recomputation.schedules)]
        profile = MeasurementContext(self.meter, self.limit, lambda *_: None).profile(probes)
        return replace(profile, lines=_with_kernels_of_all(profile.lines))

    def _may_help(self, tried: Mapping[str, ProbeLine | None], available: float) -> bool:
        """Whether a whole batch does not fit without recomputation, as :meth:`_predicted` judges."""
        plain = tried.get(KEEPING)
        if plain is None:
            return True
        step = plain.bytes_at(self.batch_size) + 2 * plain.shape_bytes
        return with_safety(0, step) > available - RESERVED_BYTES

    def _probe(self, schedule: str, needed: Needed | None = None) -> Probe:
        return Probe(
            schedule,
            lambda: self.step.trial(schedule, self._see),
            self._floor,
            self.batch_size,
            sizes=divisors(self.batch_size),
            network="loop",
            needed=needed,
        )

    def _see(self, states: States) -> None:
        self.states = states

    def _floor(self, images: int) -> int:
        """Not known without running the step; but how many images batch norms need is."""
        require_images(images, self.batch_size, self.step.module)
        return 0

    def _fitting(self, profile: Profile) -> Iterator[tuple[float, int, str]]:
        """Seconds of a batch, micro-batches and schedule, for the largest micro-batch of each schedule that fits.

        Recomputation is left out where it saves no micro-batch: it takes time, whatever noise was measured.
        """
        most = self.batch_size + 1
        for schedule, line in sorted(profile.lines.items()):
            sizes = (size for size in reversed(self._sizes(line)) if self._fits(profile, line, size))
            parts = self.batch_size // next(sizes, self.batch_size + 1)
            if 0 < parts < most:
                yield parts * line.seconds_at(self.batch_size // parts), parts, schedule
            if schedule == KEEPING and parts:
                most = parts

    def _fits(self, profile: Profile, line: ProbeLine, size: int) -> bool:
        return self._predicted(profile, line, size) + RESERVED_BYTES <= self.budget_bytes

    def _sizes(self, line: ProbeLine) -> list[int]:
        return [size for size in divisors(self.batch_size) if size >= line.smallest_batch]

    def _predicted(self, profile: Profile, line: ProbeLine, size: int) -> int:
        """Peak of a step, of loading the next batch, or of what the loop does between steps.

        The last batch of an epoch may have two sizes of its own, whose kernels stay.
        """
        state = sum(each.nbytes for each in tree_leaves(self.states) if isinstance(each, Tensor))
        between = state + self.step.between(size, self.states) + 2 * line.shape_bytes
        step = line.bytes_at(size) + 2 * line.shape_bytes
        return with_safety(profile.base_bytes, max(step, LOADED_BATCHES * self.step.held_bytes, between))

    def _tried(self, profile: Profile, parts: int, schedule: str) -> LoopPlan:
        """The plan of the largest micro-batch whose step is not refused memory, which also generates its kernels."""
        line = profile.lines[schedule]
        predicted = self._predicted(profile, line, self.batch_size // parts)
        for size in reversed([size for size in self._sizes(line) if size <= self.batch_size // parts]):
            release_memory()
            if self._runs(schedule, size):
                return LoopPlan(size, self.batch_size // size, self.batch_size, schedule, predicted)
        raise BudgetExceededError(
            f"{self._name} needs more than memory={format_bytes(self.budget_bytes)} at every micro-batch, although it "
            "was predicted to fit. Use a larger memory=."
        )

    def _runs(self, schedule: str, size: int) -> bool:
        try:
            with self.limit.reserve(SPARE_BYTES), self.limit.allow_kernels():
                self.step.trial(schedule)(size)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _infeasible(self, profile: Profile) -> InfeasibleBudgetError:
        with self.limit.allow_address_space(META_PASS_BYTES):  # nothing may be left of the budget
            smallest = self._smallest_bytes(profile)
        return infeasible(f"a step of {self._name}", self.budget_bytes, smallest)

    def _smallest_bytes(self, before: Profile) -> int:
        """Smallest budget that holds a step; 0 if the machine has less memory left.

        It is measured, because a step of any library cannot be computed without running it: under a limit that doubles
        until the smallest micro-batch fits. ``before`` is the profile within the budget that is too small.
        """
        for limit in wider_limits(self.limit):
            wider = StepPlanner(self.step, self.batch_size, limit, self.meter)
            profile = wider._measured()
            needed = [wider._least(profile, line, before) for line in profile.lines.values()]
            if needed:
                return max(-(-(min(needed) + RESERVED_BYTES + DRIFT_BYTES) // MB) * MB, self.budget_bytes + MB)
        return 0

    def _least(self, profile: Profile, line: ProbeLine, before: Profile) -> int:
        """Predicted peak of the smallest micro-batch, in a process that may measure only that one.

        Then all that it leaves counts as kernels of a micro-batch; ``before`` is the profile that left some of them.
        """
        size, left = self._sizes(line)[0], float(profile.base_bytes - before.start_bytes)
        known = [each.shape_bytes for each in (line, *before.lines.values()) if each.points[1:]]
        several = self._predicted(profile, replace(line, shape_bytes=max(known, default=left)), size)
        alone = self._predicted(profile, replace(line, shape_bytes=left), size)
        if line.points[1:]:  # in a budget for this one, it is measured, too
            alone = min(alone, with_safety(profile.base_bytes, line.points[1].peak_bytes))
        return max(alone, several)

    @property
    def _name(self) -> str:
        return type(self.step.module).__name__


def _with_kernels_of_all(lines: Mapping[str, ProbeLine]) -> dict[str, ProbeLine]:
    """Lines with the most that a new batch size left: later ones found the kernels of the same sizes in memory."""
    most = max((line.shape_bytes for line in lines.values()), default=0.0)
    return {name: replace(line, shape_bytes=most) for name, line in lines.items()}
