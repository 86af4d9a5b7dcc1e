"""Synthetic batches of what a network takes, images or several inputs, and its forward pass on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snugfit._core.inputs import Input


@dataclass(frozen=True)
class StepInputs:
    """What a network takes in a step.

    Attributes:
        shape: channels, height and width of an image, or (1, 1, N) of the values of several inputs.
        several: the inputs, if they are several.
        dtype: that of floats.
    """

    shape: tuple[int, int, int]
    several: Sequence[Input]
    dtype: torch.dtype

    def batch(self, size: int, device: str) -> tuple[Tensor, ...]:
        """Each input (B, ...) as a loader makes it, images in channels_last; integers are 0, which is a valid index."""
        if not self.several:
            return (self.packed(size, device),)
        return tuple(
            _filled(torch.empty((size, *each.shape), dtype=self._dtype(each), device=device)) for each in self.several
        )

    def packed(self, size: int, device: str) -> Tensor:
        """What units take: images (B, C, H, W) in channels_last, or the values (B, 1, 1, N) of several inputs."""
        shape = (size, *self.shape)
        return _filled(torch.empty(shape, dtype=self.dtype, device=device, memory_format=torch.channels_last))

    def call(self, module: nn.Module, batch: Sequence[Tensor]) -> Any:
        """The outputs of a module for inputs (B, ...) each, by position or by the keywords that are their names."""
        if not (self.several and self.several[0].name):
            return module(*batch)
        return module(**{each.name: tensor for each, tensor in zip(self.several, batch, strict=True)})

    def _dtype(self, given: Input) -> torch.dtype:
        found: torch.dtype = self.dtype if given.dtype == "float32" else getattr(torch, given.dtype)
        return found


def _filled(tensor: Tensor) -> Tensor:
    """A tensor of any shape with values, unless it is on the meta device."""
    if tensor.is_meta:
        return tensor
    return tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
