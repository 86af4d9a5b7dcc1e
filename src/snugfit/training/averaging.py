"""Weights to be evaluated, with BatchNorm statistics of their own: those of optimizers that average.

No training step has seen an average, so its statistics are taken anew, as the schedule-free package asks (NOTES LLS 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from snugfit.training.run import Run
from snugfit.training.seeding import derive_seed, seed_all

if TYPE_CHECKING:
    from snugfit.training.loop import BatchSource, Trainable

REFRESH_BATCHES = 50
"""Training batches that the statistics are taken over."""


def settle(trainable: Trainable, source: BatchSource, batch_size: int, phase: str, run: Run) -> None:
    """Put the weights to be evaluated in place where the run stands; nothing to do for optimizers that do not average.

    What is random in it, augmentation and dropout, depends on the run's seed and position alone.

    Args:
        trainable: what is trained.
        source: its training batches.
        batch_size: how many images to run at once.
        phase: name of the phase.
        run: the run.
    """
    if not run.workload.optimizer.averages:
        return
    epoch = run.position.epoch
    seed_all(derive_seed(run.workload.seed, phase, "settle", epoch))
    with run.limit.room_for_kernels():
        trainable.settle(_ticking(source.epoch(epoch, batch_size), run))


def _ticking(batches: Iterable[tuple[Tensor, Tensor]], run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in batches:
        run.tick()
        yield batch


def refresh_norms(module: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Take BatchNorm's running statistics anew, as the mean over the first batches.

    Args:
        module: run in training mode on inputs (B, ...), without gradients.
        batches: pairs of inputs and labels, as training sees them.
        device: where to compute.
    """
    update_bn(islice(batches, REFRESH_BATCHES), module, device=device)
