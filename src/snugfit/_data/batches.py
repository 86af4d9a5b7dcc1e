"""One split as batches: shuffled and augmented for training, or in order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, pairwise

import numpy as np
import torch

from snugfit._core.own_cores import leave_own_core
from snugfit._core.parts import check_batches, epoch_parts
from snugfit._data.device_transform import Placement, transform_on
from snugfit._data.multi_label import targets_of
from snugfit._data.sets import ImageSet
from snugfit._data.transform import Mixing, Transform

_ORDER, _EPOCH, _VIEW, _MIX = range(4)


class Batches:
    """Batches of one split, determined by seed and epoch alone.

    With ``augment``, :meth:`epoch` augments; with ``mixing`` it mixes the images of each step. With a ``placement``,
    bytes are copied to a device and transformed there, and a thread reads the next ones of an epoch meanwhile.
    """

    def __init__(self, images: ImageSet, transform: Transform, *, seed: int = 0, augment: bool = False) -> None:
        self.image_set, self.transform = images, transform
        self.seed, self.augment = seed, augment
        self.mixing: Mixing | None = None
        self.placement: Placement | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._reading: tuple[np.ndarray, Future[torch.Tensor]] | None = None

    def on_host(self) -> Batches:
        """The same batches, transformed in host memory."""
        same = copy.copy(self)
        same.placement = None
        return same

    def __len__(self) -> int:
        """Number of images."""
        return len(self.image_set)

    @property
    def labels(self) -> np.ndarray:
        """Labels in stored order, (N,) int64 or (N, classes) uint8."""
        return self.image_set.labels

    def steps(self, batch_size: int) -> int:
        """Training steps of an epoch: full batches only, but at least one."""
        return max(1, len(self) // batch_size)

    def epoch(
        self, epoch: int, batch_size: int, start_step: int = 0, parts: int = 1, mixed: bool = True
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Shuffled training batches, from step ``start_step`` on exactly as in an uninterrupted epoch.

        Each comes in so many ``parts``, whose sizes differ by at most one. An image's augmentation depends neither on
        these nor on the batch size. The last, incomplete batch is dropped. Without ``mixed``, no images are mixed.

        Yields:
            images, float32 (B, C, H, W) channels-last, and labels, (B,) int64; mixed ones, and several labels of an
            image, are (B, classes) float32.
        """
        check_batches(batch_size, start_step)
        order = np.random.default_rng((self.seed & 0xFFFFFFFF, _ORDER, epoch)).permutation(len(self))
        for rows, following in pairwise(chain(epoch_parts(len(self), batch_size, parts, start_step), [None])):
            assert rows is not None
            images, labels = self._batch(order[rows], (self.seed, _EPOCH, epoch), rows.start, self.augment)
            if mixed and self.mixing is not None:
                labels = self._mixed(self.mixing, images, order, rows, (epoch, rows.start // batch_size, batch_size))
            if following is not None:
                self._read_ahead(order[following])
            yield images, labels

    def _read_ahead(self, indices: np.ndarray) -> None:
        """Let a thread read images (B,) that are needed next, if a device computes meanwhile."""
        if self.placement is None or self.image_set.runs_own_code:
            return
        self._reader = self._reader or ThreadPoolExecutor(1, "read", leave_own_core)
        self._reading = indices, self._reader.submit(self.image_set.images, indices)

    def _read(self, indices: np.ndarray) -> torch.Tensor:
        """The images (B, C, H, W) at ``indices`` (B,), which a thread may have read."""
        reading, self._reading = self._reading, None
        if reading is not None and np.array_equal(reading[0], indices):
            return reading[1].result()
        return self.image_set.images(indices)

    def _mixed(
        self, mixing: Mixing, images: torch.Tensor, order: np.ndarray, rows: slice, where: tuple[int, int, int]
    ) -> torch.Tensor:
        """Mix images (B, C, H, W) at these rows of an epoch's order (N,), in place; returns targets (B, classes).

        ``where`` is the epoch, the step, and the images of a step.
        """
        epoch, step, batch_size = where
        first, end = step * batch_size, min((step + 1) * batch_size, len(self))
        previous = rows.start - 1 if rows.start > first else end - 1
        if previous < rows.stop and previous >= rows.start:
            before = images[-1].clone()
        else:
            before = self._batch(order[[previous]], (self.seed, _EPOCH, epoch), previous, self.augment)[0][0]
        mix = mixing.draw((self.seed & 0xFFFFFFFF, _MIX, epoch, step), *images.shape[2:])
        mix.images(images, before)
        labels = self.image_set.labels
        own, other = (targets_of(labels[order[each]]) for each in (rows, [previous]))
        return mix.targets(own, other, mixing.classes)

    def in_order(self, batch_size: int, view: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every image once, in stored order; with a ``view`` augmented, if augmentation is on, always in the same way.

        Yields:
            images, float32 (B, C, H, W) channels-last, and labels, (B,) int64 or (B, classes) float32; the last batch
            may be smaller.
        """
        check_batches(batch_size, 0)
        for first in range(0, len(self), batch_size):
            indices = np.arange(first, min(first + batch_size, len(self)))
            yield self._batch(indices, (self.seed, _VIEW, view or 0), first, self.augment and view is not None)

    def _batch(
        self, indices: np.ndarray, seed: tuple[int, ...], start: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self._read(indices), targets_of(self.image_set.labels[indices])
        if self.placement is None or images.is_floating_point():  # prepared images are used as they are
            return self.transform(images, augment, seed, start), labels
        return transform_on(self.placement, self.transform, images, augment, seed, start), labels
