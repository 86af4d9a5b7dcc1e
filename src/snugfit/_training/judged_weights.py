"""Weights to be judged: averaged ones put in place, and BatchNorm statistics that belong to them.

Training normalises by its batches and tracks a running average besides, which lags behind the weights: after 14 steps a
quarter of it is still what it began with. So some training images are run through the weights as they are, whenever
these are validated, handed on or kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice

from torch import Tensor

from snugfit._training.run import Run
from snugfit._training.seeding import derive_seed, seed_all
from snugfit._training.trainable import BatchSource, Trainable

SHARE = 0.06
"""Of the training images, those that statistics are taken over; without a backward pass, 2 to 3 % of an epoch."""
FEWEST = 64
"""Images, at least: VGG-11 had 28 % of test images with these, 30 % with 1,000, and 27 % with 8."""
MOST = 4096
"""Images, at most: more change nothing."""


def images_for(count: int) -> int:
    """How many of ``count`` training images statistics are taken over."""
    return min(max(int(SHARE * count), FEWEST), MOST, count)


def settle(trainable: Trainable, source: BatchSource, batch_size: int, phase: str, run: Run) -> None:
    """Put the weights to be judged in place where the run stands, with statistics of their own.

    What is random in it, such as augmentation, depends on the run's seed and position alone.

    Args:
        trainable: what is trained.
        source: its training batches.
        batch_size: how many images to run at once, at most.
        phase: name of the phase.
        run: the run.
    """
    epoch, images = run.position.epoch, images_for(len(source))
    size = min(batch_size, images)
    seed_all(derive_seed(run.workload.seed, phase, "settle", epoch))
    with run.limit.allow_kernels():
        trainable.settle(_ticking(islice(source.epoch(epoch, size), images // size), run))
    run.tick()


def _ticking(batches: Iterable[tuple[Tensor, Tensor]], run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches; the seconds until the last one is used are noted."""
    started = time.perf_counter()
    for batch in batches:
        run.tick()
        yield batch
    run.add_overhead("statistics", time.perf_counter() - started)
