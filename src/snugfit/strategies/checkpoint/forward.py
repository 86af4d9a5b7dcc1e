"""The forward pass of a recomputation schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from snugfit._chain import Chain
from snugfit._training.network import Forward
from snugfit.memory.autocast import autocast_for_recomputation
from snugfit.strategies.checkpoint.schedule import Schedule


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


def recomputing_forward(chain: Chain, schedule: Schedule) -> Forward:
    """The forward pass over a chain, with recomputation by a schedule.

    A stretch that is recomputed is a checkpoint of torch's; stretches within it are nested checkpoints. Tensors that
    the backward pass has used are freed at once, as are gradients that it has passed on.

    Args:
        chain: the chain.
        schedule: of all its units.

    Returns:
        A function from images (batch, *input_shape) to the output of the chain, such as (batch, classes).
    """
    modules = [unit.module for unit in chain.all_units]
    if not schedule.recomputes:
        return chain.forward

    def run(stretch: Schedule, images: Tensor) -> Tensor:
        for part in stretch.parts:
            if isinstance(part, Schedule):
                inside = partial(_contexts, [modules[unit] for unit in part.units])
                images = checkpoint(run, part, images, use_reentrant=False, context_fn=inside)
            else:
                images = modules[part](images)
        return images

    return partial(run, schedule)
