"""The budget of another library's loop: planned, enforced, measured and recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from types import ModuleType

from torch import nn

from snugfit._api.loop import FitRecord, LoopOptions, module_device
from snugfit._core.amounts import parse_bytes
from snugfit._core.options import from_keywords
from snugfit._engine.loop_plan import LoopPlan, planning
from snugfit._engine.process import baseline
from snugfit._engine.step_plan import LibraryStep, StepPlanner
from snugfit._quantities import format_bytes
from snugfit._training.run import TRIM_SECONDS
from snugfit.errors import UsageError
from snugfit.memory import MemoryLimit, make_meter, release_memory, trim_heap
from snugfit.memory.freed_memory import FreedMemory
from snugfit.profiling import META_PASS_BYTES


def require(library: str, install: str) -> ModuleType:
    """Import a library, or give the command that installs it; raises UsageError if it is not installed."""
    try:
        return import_module(library)
    except ImportError as error:
        package = library.partition(".")[0]
        raise UsageError(f"this module needs {package}, which is missing: {install}") from error


class LoopBudget:
    """A memory budget around a loop that another library runs.

    It counts from :func:`snugfit.prepare_process`, or from the plan if that was not called.

    Attributes:
        steps: steps of the optimizer since :meth:`start`.
    """

    def __init__(self, memory: str | int) -> None:
        self.budget_bytes = int(parse_bytes(from_keywords(LoopOptions, {"memory": memory}).memory))
        self.loop_plan: LoopPlan | None = None
        self._inside, self._open = ExitStack(), ExitStack()
        self._known: set[int] = set()
        self.steps = self._measured = self._micro_batches = 0
        self._freed: FreedMemory | None = None
        self._trimmed_at = time.perf_counter()

    def plan(self, module: nn.Module, make_step: Callable[[], LibraryStep], batch_size: int) -> LoopPlan:
        """Measure steps within the budget, and choose micro-batches and recomputation; see :class:`StepPlanner`.

        Raises:
            InfeasibleBudgetError: no micro-batch fits the budget.
            BudgetExceededError: a whole batch, which is the example, does not.
        """
        device = module_device(module)
        resting = baseline(None, device)
        self._meter = make_meter(resting, device)  # its thread begins before memory is limited
        self._limit = MemoryLimit(self.budget_bytes, resting, device)
        with self._limit, planning(batch_size, self._limit):
            self.loop_plan = self._planned(make_step, batch_size).with_kept_memory(self._limit, between=False)
        self._known = {self.loop_plan.micro_batch}
        return self.loop_plan

    def _planned(self, make_step: Callable[[], LibraryStep], batch_size: int) -> LoopPlan:
        with self._limit.allow_address_space(META_PASS_BYTES):
            step = make_step()
        return StepPlanner(step, batch_size, self._limit, self._meter).plan()

    def start(self) -> None:
        """Enforce and measure from now on; lifts first what an exception has left in force."""
        self.close()
        release_memory()
        self.steps = self._measured = self._micro_batches = 0
        self._open.enter_context(self._limit)
        self._open.callback(self.mark)
        self._freed = None
        self._meter.restart()

    def begin(self, images: int | None, *, trains: bool = False) -> None:
        """A micro-batch of so many images is next: let the limit follow the memory that is mapped.

        Without a number it may generate kernels; :data:`RESERVED_BYTES` pays for them. Before a plan there is no limit.
        Freed memory is kept while it ``trains``, and given back afterwards.
        """
        if self.loop_plan is None:
            return
        self.end()
        if trains:
            self._keep_freed(self.loop_plan)
        if time.perf_counter() - self._trimmed_at > TRIM_SECONDS:
            trim_heap()
            self._trimmed_at = time.perf_counter()
        self._limit.refresh()
        if images not in self._known:
            self._inside.enter_context(self._limit.allow_kernels())
        if images is not None:
            self._known.add(images)

    def _keep_freed(self, plan: LoopPlan) -> None:
        """Keep freed memory until the end of a micro-batch, once a step has made the optimizer's state.

        The micro-batches of the next step keep nothing, and show what every layer and the update take.
        """
        if not self.steps:
            self._micro_batches += 1
            return
        if self._freed is None:
            self._freed = plan.freed_memory(self._meter, self._limit, self._micro_batches)
            self._open.callback(self._freed.close)
        self._inside.callback(self._freed.pause, always=True)
        self._inside.enter_context(self._freed.kept(steps=True))

    def end(self) -> None:
        """A micro-batch has been used."""
        if self._freed is not None:
            self._freed.after_step()
        self._inside.close()
        self.mark()

    def mark(self) -> None:
        """Read the peak, if anything is measured."""
        if self.loop_plan is None:
            return
        self._measured = max(self._measured, self._meter.mark())

    def close(self) -> None:
        """Read the peak for the last time and lift the limit, if it is in force."""
        self._inside.close()
        self._open.close()

    @property
    def refused(self) -> str:
        """What to say of a step that is refused memory."""
        return (
            f"a step was refused memory within memory={format_bytes(self.budget_bytes)}, although it was predicted to "
            "fit. Free what the loop keeps between steps, or use a larger memory=."
        )

    @property
    def record(self) -> FitRecord:
        """What was predicted, allowed and measured so far."""
        plan = self.loop_plan
        if plan is None:
            raise UsageError("nothing has been planned yet: a record exists once training has begun.")
        return FitRecord.of(plan, self._limit, self._measured, self.steps)
