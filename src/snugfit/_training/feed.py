"""What feeds training steps: batches, and random numbers that depend on the position alone."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from snugfit._training.run import Run
from snugfit._training.seeding import derive_seed, seed_all
from snugfit.memory.device import has_own_memory

Batch = tuple[Tensor, Tensor]


class Feed:
    """Batches (B, ...) of an epoch from the run's position on; random numbers are seeded at every step.

    A device with a memory of its own computes by itself, so the next batch is read on the host meanwhile. Own
    transforms draw the same random numbers then, and after a run was resumed: a step is seeded before its first batch
    is read.
    """

    def __init__(self, batches: Iterator[Batch], run: Run, phase: str) -> None:
        self._batches, self._run, self._phase = batches, run, phase
        self._reads_ahead = has_own_memory(run.device)
        self._ahead: Batch | None = None

    def begin_step(self) -> None:
        """Seed the step, unless its first batch was read after that."""
        if self._ahead is None:
            self._seed(self._run.position.step)

    def take(self) -> Batch:
        """The next batch, on the run's device; the run counts the seconds that it waits."""
        started = time.perf_counter()
        images, labels = self._ahead or next(self._batches)
        self._ahead = None
        batch = images.to(self._run.device), labels.to(self._run.device)
        self._run.position.data_seconds += time.perf_counter() - started
        return batch

    def read_ahead(self, *, step_ends: bool) -> None:
        """Read the next batch if the device is still working on the last one, with which the step ends or goes on."""
        if not self._reads_ahead:
            return
        if step_ends:
            self._seed(self._run.position.step + 1)
        self._ahead = next(self._batches, None)

    def _seed(self, step: int) -> None:
        seed_all(derive_seed(self._run.workload.seed, self._phase, self._run.position.epoch, step))
