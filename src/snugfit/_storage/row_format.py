"""Layout of one sample's activation in a cache, and its conversion from and to float32.

Feature maps are stored with the channels last, so that they are read as ``channels_last`` tensors without a transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from snugfit._core.options import CacheDtype

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CHANNEL_RANGE_ELEMENTS = 64
_SLICE_BYTES = 1 << 20


@dataclass(frozen=True)
class RowFormat:
    """Layout of cached rows.

    ``uint8`` rows are affine: each range of a row holds its smallest value and its step, then ``value = smallest +
    step * byte``, so no value is clipped and the error is at most half a step, (largest - smallest) / 510. A range
    is one channel of one row. In feature maps of fewer than 64 elements, where two floats per channel would cost more
    than an eighth of the bytes, it is the whole row. ``float16`` saturates at 65504 instead of overflowing.

    Attributes:
        row_shape: shape of one row, ``(C, H, W)`` or ``(D,)``.
        dtype: stored type.
    """

    row_shape: tuple[int, ...]
    dtype: CacheDtype

    @property
    def elements(self) -> int:
        """Values in a row."""
        return prod(self.row_shape)

    @property
    def ranges(self) -> int:
        """Affine ranges in a row; 0 for the float types."""
        if self.dtype != "uint8":
            return 0
        return self.row_shape[0] if prod(self.row_shape[1:]) >= _CHANNEL_RANGE_ELEMENTS else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        if self.dtype != "uint8":
            return self.elements * _FLOATS[self.dtype].itemsize
        return 8 * self.ranges + -(-self.elements // 4) * 4

    def encode(self, features: Tensor) -> Tensor:
        """Turn features (B, *row_shape) into contiguous CPU bytes (B, row_bytes), uint8.

        Float32 features whose memory has the stored order are viewed, not copied.
        """
        stored = features.detach().movedim(1, -1)
        if self.dtype == "float32":
            return stored.float().cpu().contiguous().view(len(features), self.elements).view(torch.uint8)
        raw = torch.empty(len(features), self.row_bytes, dtype=torch.uint8)
        if self.dtype == "uint8":
            self._quantize(stored, raw)
        else:
            values = raw.view(_FLOATS[self.dtype]).view(stored.shape).copy_(stored)
            if self.dtype == "float16":
                values.clamp_(-65504, 65504)
        return raw

    def decode(self, raw: Tensor) -> Tensor:
        """Turn bytes (B, row_bytes) into float32 features (B, *row_shape), channels-last, in new memory."""
        channels, *sizes = self.row_shape
        stored = torch.empty(len(raw), *sizes, channels)
        if self.dtype == "uint8":
            smallest, step, levels = self._parts(raw)
            stored.view(levels.shape).copy_(levels).mul_(step).add_(smallest)
        else:
            stored.copy_(raw.view(_FLOATS[self.dtype]).view(stored.shape))
        return stored.movedim(-1, 1)

    def _quantize(self, stored: Tensor, raw: Tensor) -> None:
        """Fill ``raw`` (B, row_bytes) from (B, ..., C), some rows at a time, so that temporaries stay near 1 MiB."""
        rows = max(1, _SLICE_BYTES // (4 * self.elements))
        for first in range(0, len(raw), rows):
            smallest, step, levels = self._parts(raw[first : first + rows])
            values = stored[first : first + rows].float().cpu().reshape(levels.shape)
            low, high = torch.aminmax(values, dim=1, keepdim=True)
            smallest.copy_(low)
            step.copy_((high - low) / 255)
            scale = torch.where(step > torch.finfo(torch.float32).tiny, 1 / step, 0)
            levels.copy_((values - low).mul_(scale).round_().clamp_(0, 255))

    def _parts(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """View uint8 rows: smallest values and steps, float32 (B, 1, R), and levels (B, values, R) of R ranges."""
        head = 8 * self.ranges
        floats = raw[:, :head].view(torch.float32)
        levels = raw[:, head : head + self.elements].view(len(raw), self.elements // self.ranges, self.ranges)
        return floats[:, None, : self.ranges], floats[:, None, self.ranges :], levels
