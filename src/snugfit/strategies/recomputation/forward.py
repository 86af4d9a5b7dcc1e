"""The forward pass of a recomputation schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from snugfit._training.network import Forward
from snugfit.memory.autocast import autocast_for_recomputation
from snugfit.memory.paging import PageFile
from snugfit.strategies.recomputation.paging import Pager
from snugfit.strategies.recomputation.schedule import Schedule


@contextmanager
def _frozen_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let BatchNorm normalise by its batch without updating its buffers: the first forward pass has updated them.

    The buffers are still passed, with momentum 0, since recomputation must save the same tensors as the first pass.
    """
    norms = [m for module in modules for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    settings = [(norm.momentum, norm._buffers["num_batches_tracked"]) for norm in norms]
    for norm in norms:
        norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, settings, strict=True):
            norm.momentum, norm._buffers["num_batches_tracked"] = momentum, tracked


def _contexts(modules: Sequence[nn.Module]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first forward pass and of the recomputation."""
    return nullcontext(), _recomputing(modules, autocast_for_recomputation())


@contextmanager
def _recomputing(modules: Sequence[nn.Module], precision: AbstractContextManager[object]) -> Iterator[None]:
    with precision, _frozen_statistics(modules):
        yield


def recomputing_forward(modules: Sequence[nn.Module], schedule: Schedule, file: PageFile | None = None) -> Forward:
    """The forward pass over consecutive modules, with recomputation and paging by a schedule.

    A stretch that is recomputed is a checkpoint of torch's; stretches within it are nested checkpoints. Tensors that
    the backward pass has used are freed at once, as are gradients that it has passed on.

    Args:
        modules: such as those of a chain's units.
        schedule: of all of them.
        file: for what the schedule keeps on disk.

    Returns:
        A function from the first module's input (B, ...) to the last one's output (B, ...).
    """
    paged, resident = Schedule(schedule.parts[: schedule.paged]), Schedule(schedule.parts[schedule.paged :])
    pager = Pager(file, modules) if file is not None and schedule.paged else None

    def run(stretch: Schedule, values: Tensor) -> Tensor:
        for part in stretch.parts:
            if isinstance(part, Schedule):
                inside = partial(_contexts, [modules[unit] for unit in part.units])
                values = checkpoint(run, part, values, use_reentrant=False, context_fn=inside)
            else:
                values = modules[part](values)
        return values

    def run_paged(pager: Pager, values: Tensor) -> Tensor:
        pager.count_blocks(values.device)
        with pager.paging(values):
            values = run(paged, values)
        return run(resident, values)

    return partial(run, schedule) if pager is None else partial(run_paged, pager)
