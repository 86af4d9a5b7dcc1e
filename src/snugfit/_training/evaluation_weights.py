"""Weights for evaluation: averaged weights, and the BatchNorm statistics that belong to them.

Training normalises by its batches and also tracks a running average, which lags behind the weights: after 14 steps a
quarter of it is still the initial value. So some training images are run through the current weights whenever these are
validated, passed on or stored.
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
"""Share of training images for statistics; without a backward pass they take 2 to 3 % of an epoch."""
FEWEST = 64
"""Smallest number of images: VGG-11 had 28 % of test images with these, 30 % with 1,000, and 27 % with 8."""
MOST = 4096
"""Largest number of images; more change nothing."""


def images_for(count: int) -> int:
    """Number of images for statistics, of ``count`` training images."""
    return min(max(int(SHARE * count), FEWEST), MOST, count)


def settle(trainable: Trainable, source: BatchSource, batch_size: int, phase: str, run: Run) -> None:
    """Put the weights for evaluation in place at the run's position, with their own statistics.

    Randomness, such as augmentation, depends only on the run's seed and position.

    Args:
        trainable: the network or block.
        source: its training batches.
        batch_size: most images to run at once.
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
    """The batches (B, ...); records the seconds until the last one is used."""
    started = time.perf_counter()
    for batch in batches:
        run.tick()
        yield batch
    run.add_overhead("statistics", time.perf_counter() - started)
