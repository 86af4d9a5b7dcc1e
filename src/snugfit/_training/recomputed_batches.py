"""Activations recomputed for every batch, if a cache of them would not fit the storage budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from snugfit._training.trainable import BatchSource


class RecomputedBatches:
    """A batch source of activations: another source's batches through a trained trunk.

    Args:
        source: the images.
        forward: images (B, C, H, W) to activations, in evaluation mode.
        chunk: images in one forward pass, limited by the memory next to the block in training.
        device: where to compute.
    """

    def __init__(
        self, source: BatchSource, forward: Callable[[Tensor], Tensor], chunk: int, device: torch.device
    ) -> None:
        self.source, self.forward, self.chunk, self.device = source, forward, chunk, device

    def __len__(self) -> int:
        return len(self.source)

    def steps(self, batch_size: int) -> int:
        """Training batches per epoch."""
        return self.source.steps(batch_size)

    def epoch(self, epoch: int, batch_size: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches (B, ...) of one epoch, with new augmentation."""
        for images, labels in self.source.epoch(epoch, batch_size, start_step):
            yield self._activations(images), labels

    def in_order(self, batch_size: int, view: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, in order, as batches (B, ...)."""
        for images, labels in self.source.in_order(batch_size, view):
            yield self._activations(images), labels

    @torch.no_grad()
    def _activations(self, images: Tensor) -> Tensor:
        parts = torch.split(images, self.chunk)
        return torch.cat([self.forward(part.to(self.device)).float() for part in parts])
