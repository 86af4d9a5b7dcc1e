"""A device whose memory is arithmetic: segments, blocks and a limit, as torch's caching allocator keeps them."""

from __future__ import annotations

import itertools

import torch

from snugfit.memory.device import DeviceUse

MB = 10**6
SMALL, SEGMENT = 2 * 2**20, 20 * 2**20
"""A block of up to 10 MiB takes a part of a segment of that size, a larger one a segment of its own."""


def rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class FakeMemory:
    """:class:`snugfit.memory.device.DeviceMemory` without a device.

    ``context`` bytes appear when it starts, of which NVML tells ``process``: ``"own"``, ``"all"`` (the whole device
    alone, with ``others`` using it too) or ``"none"``.
    """

    name = "fake"

    def __init__(
        self,
        total: int = 1000 * MB,
        context: int = 100 * MB,
        *,
        nvml: str = "own",
        others: int = 0,
        unified: bool = False,
    ) -> None:
        self.total, self.context, self.nvml, self.others, self.unified = total, context, nvml, others, unified
        self.segments: dict[int, int] = {}
        self.blocks: dict[int, tuple[int, int]] = {}
        self.pinned, self.most, self.started, self.waits = 0, total, False, 0
        self.peaks = [0, 0]
        self._numbers = itertools.count()

    @property
    def reserved(self) -> int:
        return sum(self.segments.values())

    @property
    def allocated(self) -> int:
        return sum(size for _, size in self.blocks.values())

    def allocate(self, size: int) -> int:
        """A block of a segment with enough left, or of a new one; as torch does, after releasing unused ones."""
        size = rounded(size, 512)
        whole = SEGMENT if size <= SEGMENT // 2 else rounded(size, SMALL)
        segment = next((each for each in self.segments if self._left(each) >= size), None)
        if segment is None:
            if self.reserved + whole > self.most:
                self.release()
            if self.reserved + whole > min(self.most, self.total - self.context - self.others):
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
            segment = next(self._numbers)
            self.segments[segment] = whole
        block = next(self._numbers)
        self.blocks[block] = segment, size
        self.peaks = [max(self.peaks[0], self.reserved), max(self.peaks[1], self.allocated)]
        return block

    def free_block(self, block: int) -> None:
        del self.blocks[block]

    def _left(self, segment: int) -> int:
        return self.segments[segment] - sum(size for where, size in self.blocks.values() if where == segment)

    def used(self) -> int | None:
        if self.nvml == "none":
            return None
        return self.others + (self.context if self.started else 0) + self.reserved

    def free(self) -> int:
        return self.total - self.others - self.reserved - (self.context if self.started else 0)

    def start(self) -> None:
        self.started = True
        self.free_block(self.allocate(MB))

    def read(self) -> DeviceUse:
        process = self.context + self.reserved if self.nvml == "own" else None
        return DeviceUse(self.reserved, *self.peaks, process=process, pinned=self.pinned)

    def reset_peaks(self) -> None:
        self.peaks = [self.reserved, self.allocated]

    def limit(self, reserved: int | None) -> None:
        self.most = self.total if reserved is None else reserved

    def release(self) -> None:
        used = {segment for segment, _ in self.blocks.values()}
        self.segments = {number: size for number, size in self.segments.items() if number in used}

    def synchronize(self) -> None:
        self.waits += 1
