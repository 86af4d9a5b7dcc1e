"""Dry run of a phase before it begins: generate its kernels, check that it fits, count its tensors.

The first step on a new shape is slow and reserves address space (see :class:`snugfit.memory.MemoryLimit`). A step that
is refused memory half way has already updated a part of the weights. So a phase first runs on synthetic data with a
trainable that is discarded; the real one starts from the stored weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from snugfit._core.parts import part_sizes
from snugfit._core.plan import Phase
from snugfit._core.workload import Workload
from snugfit._quantities import format_bytes
from snugfit._training.events import Notice
from snugfit._training.run import Run
from snugfit._training.strategy import Trainable
from snugfit.errors import MEMORY_ERRORS, BudgetExceededError
from snugfit.memory import is_out_of_memory, release_memory
from snugfit.memory.tensors import tensor_peak_bytes

SPARE_BYTES = 1_000_000
"""Bytes that a dry run leaves free for the real phase: a batch being read, the metrics file."""

MakeBatch = Callable[[int], tuple[Tensor, Tensor]]


def smaller_batch_sizes(batch: int, smallest: int = 1) -> list[int]:
    """Batch sizes to fall back to: each a quarter less, which frees more than the kernels of a new size take."""
    sizes = []
    while batch > smallest:
        batch = max(min(batch - 1, int(batch * 0.75)), smallest)
        sizes.append(batch)
    return sizes


def dry_run_phase(
    phase: Phase, smaller: Iterable[int], make: Callable[[int], Trainable], batch: MakeBatch, run: Run
) -> Phase:
    """Run a training step of a phase on synthetic data, and record its peak tensor bytes in the run's position.

    A phase that is refused memory although it was predicted to fit continues at the next smaller batch, with a notice.
    On resume the batch is the same. ``smaller`` are batch sizes in descending order; ``make`` and ``batch`` build the
    trainable, which is discarded afterwards, and inputs and labels for a batch size.

    Raises:
        BudgetExceededError: it fits at no batch size.
    """
    found = run.position.notes.setdefault("batches", {})
    known = found.get(phase.name)
    sizes = [known] if known is not None else [phase.batch_size, *smaller]
    for size in sizes:
        release_memory()  # what was worked out before the phase is freed, too: both may exceed the budget
        run.meter.restart()
        tensor_bytes = _attempt(make, size, batch, run)
        release_memory()
        run.tick()
        if tensor_bytes is not None:
            run.position.phase_tensor_bytes = max(run.position.phase_tensor_bytes, tensor_bytes)
            found[phase.name] = size
            if size != phase.batch_size:
                if known is None:
                    run.save({})  # a process that takes the run up must train at the same batch
                run.emit(Notice(f"{phase.name}: batch {phase.batch_size} was refused memory; training at {size}"))
            return replace(phase, batch_size=size)
    budget = format_bytes(run.budget.memory_bytes or 0)
    raise BudgetExceededError(
        f"{phase.name} needs more than the memory budget of {budget} at every batch size tried, although it was "
        f"predicted to fit. Use a larger {run.budget.memory_flag}."
    )


def _attempt(make: Callable[[int], Trainable], size: int, batch: MakeBatch, run: Run) -> int | None:
    """Peak tensor bytes of a step; None if memory was refused, without leaving gradients in shared layers."""
    trainable: Trainable | None = None
    try:
        with run.limit.reserve(SPARE_BYTES):
            with run.limit.allow_kernels():
                trainable = make(size)
                _step(trainable, size, batch, run.workload)
            state = [item for group in trainable.state().values() for item in group.values() if torch.is_tensor(item)]
            peak = tensor_peak_bytes(lambda: _step(trainable, size, batch, run.workload), [*trainable.modules, *state])
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        for module in trainable.modules if trainable is not None else ():
            module.zero_grad()
        return None
    return peak


def _step(trainable: Trainable, size: int, batch: MakeBatch, workload: Workload) -> None:
    """A step on the smallest and the largest micro-batch; the second holds the gradients of the first meanwhile."""
    parts = trainable.micro_batches
    sizes = part_sizes(workload.step_images(size, parts), parts)
    for index, images in enumerate((sizes[-1], sizes[0])[:parts]):
        trainable.step(*batch(images), 1.0, index == min(parts, 2) - 1)
