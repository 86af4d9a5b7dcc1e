"""Batches of activations: read from a cache ahead of their use (NeuroFlux section 5.3), or recomputed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor

from snugfit._core.own_cores import leave_own_core
from snugfit._core.parts import check_batches, epoch_parts
from snugfit._storage.activation_cache import ActivationCache
from snugfit._training.strategy import BatchSource
from snugfit.errors import UsageError

_THREAD_STACK = 512 * 1024
THREAD_BYTES = 2 * _THREAD_STACK
"""Address space of the reading thread: its stack, guard page and thread-local memory."""


class CachedBatches:
    """A cache as a source of batches, with the interface (and the order of samples) of ``snugfit._data``'s ``Batches``.

    The cache holds ``views`` augmented passes, one after the other; epoch ``e`` uses view ``e % views``. An iteration
    holds two buffers of stored rows in addition to the float32 batch in use.

    Raises:
        UsageError: the cache's rows cannot be divided into ``views``.
    """

    def __init__(self, cache: ActivationCache, *, seed: int = 0, views: int = 1) -> None:
        if views < 1 or cache.rows % views:
            raise UsageError(f"cache '{cache.name}' of {cache.rows} rows cannot hold {views} views.")
        self.cache, self.seed, self.views = cache, seed, views
        self._reader = _background_thread()

    def __len__(self) -> int:
        return self.cache.rows // self.views

    def steps(self, batch_size: int) -> int:
        """Training steps per epoch: full batches only, but at least one."""
        return max(1, len(self) // batch_size)

    def epoch(
        self, epoch: int, batch_size: int, start_step: int = 0, parts: int = 1, mixed: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled training batches from step ``start_step`` on, each in so many nearly equal ``parts``.

        The last, incomplete batch is dropped. Activations are never mixed.

        Yields:
            features, float32 (B, *row_shape), channels-last for feature maps, and labels, (B,) int64.

        Raises:
            CheckpointError: the cache's file was truncated.
        """
        check_batches(batch_size, start_step)
        order = _epoch_order(self.seed, epoch, len(self)) + (epoch % self.views) * len(self)
        rows = epoch_parts(len(self), batch_size, parts, start_step)
        return self._batches((order[each] for each in rows), -(-batch_size // parts))

    def in_order(self, batch_size: int, view: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample of one view (the first by default) once, in stored order; the last batch may be smaller.

        Yields features (B, *row_shape) and labels (B,), and raises, as :meth:`epoch` does.
        """
        check_batches(batch_size, 0)
        start = (view or 0) % self.views * len(self)
        rows = np.arange(start, start + len(self))
        return self._batches((rows[at : at + batch_size] for at in range(0, len(self), batch_size)), batch_size)

    def on_host(self) -> CachedBatches:
        """These batches, which are in host memory."""
        return self

    def close(self) -> None:
        """End the reading thread and close the cache; its disk space is freed only after that, if it is deleted."""
        self._reader.shutdown(wait=True)
        self.cache.close()

    def _batches(self, batches: Iterator[np.ndarray], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (B, *row_shape) and labels (B,) of each batch of at most ``size`` rows; the next is being read."""
        upcoming = next(batches, None)
        if upcoming is None:
            return
        buffers = [self.cache.buffer(min(size, len(self))) for _ in range(2)]
        pending = self._fetch(upcoming, buffers[0])
        try:
            while upcoming is not None:
                rows, (raw, spare) = upcoming, buffers
                pending.result()
                upcoming = next(batches, None)
                if upcoming is not None:
                    pending = self._fetch(upcoming, spare)
                buffers.reverse()
                yield self.cache.format.decode(raw[: len(rows)]), torch.from_numpy(self.cache.labels[rows])
        finally:
            wait([pending])

    def _fetch(self, rows: np.ndarray, buffer: Tensor) -> Future[None]:
        return self._reader.submit(self.cache.read_raw, rows, buffer[: len(rows)])


def _epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """A permutation of ``range(rows)`` (int64), the same as in ``_data.Batches``: so do recomputed activations."""
    return np.random.default_rng((seed & 0xFFFFFFFF, 0, epoch)).permutation(rows)


def _background_thread() -> ThreadPoolExecutor:
    """Start one thread with a small stack; the usual 8 MiB would count as private memory under the limit."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snugfit-cache", initializer=leave_own_core)
    usual = threading.stack_size(_THREAD_STACK)
    try:
        executor.submit(int).result()
    finally:
        threading.stack_size(usual)
    return executor


class RecomputedBatches:
    """Another source's batches through a trained trunk, if a cache of them would not fit the storage budget.

    ``forward`` turns images (B, C, H, W) into activations, in evaluation mode, at most ``chunk`` of them at once, which
    the memory next to the block in training allows; so the source's batches are in host memory.
    """

    def __init__(
        self, source: BatchSource, forward: Callable[[Tensor], Tensor], chunk: int, device: torch.device
    ) -> None:
        self.source, self.forward, self.chunk, self.device = source.on_host(), forward, chunk, device

    def on_host(self) -> RecomputedBatches:
        """These batches: their source is in host memory."""
        return self

    def __len__(self) -> int:
        return len(self.source)

    def steps(self, batch_size: int) -> int:
        """Training batches per epoch."""
        return self.source.steps(batch_size)

    def epoch(
        self, epoch: int, batch_size: int, start_step: int = 0, parts: int = 1, mixed: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches (B, ...) of one epoch in nearly equal parts, with new augmentation."""
        for images, labels in self.source.epoch(epoch, batch_size, start_step, parts, mixed):
            yield self._activations(images), labels

    def in_order(self, batch_size: int, view: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, in order, as batches (B, ...)."""
        for images, labels in self.source.in_order(batch_size, view):
            yield self._activations(images), labels

    @torch.no_grad()
    def _activations(self, images: Tensor) -> Tensor:
        parts = torch.split(images, self.chunk)
        return torch.cat([self.forward(part.to(self.device)).float() for part in parts])
