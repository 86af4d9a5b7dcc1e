"""Tensors that leave a GPU for pinned host memory while it computes, and come back in reverse order.

A stream of its own copies. The GPU's memory for it does not depend on how fast that is: one tensor that is being
written, and one that is read ahead.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from snugfit.memory.device import device_at_rest, has_own_memory

_MEASURED_BYTES = 16 << 20
_MEASURED_SHAPE = (4, 64, 56, 56)
_MEASURED_TIMES = 10


@dataclass(eq=False)
class HostPage:
    """Values (N,) of a type in host memory, until nothing refers to it; without memory for those on the meta device."""

    count: int
    dtype: torch.dtype
    device: torch.device
    values: Tensor | None
    is_read: bool = False


@dataclass(frozen=True, eq=False)
class _Transfer:
    """Values (N,) on the device that are being copied to a page, or from it, and the event of their copy.

    Attributes:
        version: of values that are written: how often they had been changed in place. None for values that are read.
    """

    page: HostPage
    values: Tensor
    event: torch.cuda.Event | None
    version: int | None = None

    def wait(self) -> None:
        """Let what the current stream does next begin after the copy."""
        if self.event is not None:
            self.event.wait(torch.cuda.current_stream(self.values.device))

    def check(self) -> None:
        """Raise RuntimeError if values were changed in place while they were copied."""
        if self.version is not None and self.values._version != self.version:
            raise RuntimeError("a saved tensor was changed in place while it was copied to host memory")


@dataclass(eq=False)
class HostPages:
    """Pages of a GPU in host memory.

    Tensors on the meta device take what they would take on the GPU. Those on the processor are copied at once.
    """

    _pages: list[weakref.ref[HostPage]] = field(default_factory=list)
    _transfer: _Transfer | None = None
    _stream: torch.cuda.Stream | None = None

    def begin(self, device: torch.device) -> None:
        """Free what a pass on the device that failed was copying."""
        self.finish()

    def write(self, values: Tensor) -> HostPage:
        """Begin to copy values (N,) of the device, which stay in its memory until the next ones are written."""
        self.finish()
        version = values._version
        pinned = values.device.type == "cuda"
        kept = None if values.is_meta else torch.empty_like(values, device="cpu", pin_memory=pinned)
        page = HostPage(len(values), values.dtype, values.device, kept)
        self._transfer = _Transfer(page, values, self._copy(values, kept), version)
        self._pages = [each for each in self._pages if each() is not None]
        self._pages.append(weakref.ref(page))
        return page

    def read(self, page: HostPage) -> Tensor:
        """The values of a page, (N,), on the device; begins to copy those of the last page that was not read."""
        transfer = self._transfer
        self.finish()
        if transfer is None or transfer.page is not page or transfer.version is not None:
            transfer = self._fetch(page)
            transfer.wait()
        page.is_read = True
        unread = (found for each in reversed(self._pages) if (found := each()) is not None and not found.is_read)
        if (before := next(unread, None)) is not None:
            self._transfer = self._fetch(before)
        return transfer.values

    def finish(self) -> None:
        """Let the device go on only after the copy that began last, so that its values may be freed."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
            transfer.check()

    def __del__(self) -> None:
        if self._transfer is not None:  # after an error in mid-step
            self._transfer.wait()

    def _fetch(self, page: HostPage) -> _Transfer:
        values = torch.empty(page.count, dtype=page.dtype, device=page.device)
        return _Transfer(page, values, self._copy(page.values, values))

    def _copy(self, source: Tensor | None, into: Tensor | None) -> torch.cuda.Event | None:
        """Copy (N,) behind all work of the current stream, beside what follows it; None is on the meta device."""
        if source is None or into is None:
            return None
        device = source.device if source.is_cuda else into.device
        if device.type != "cuda":
            into.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        event: torch.cuda.Event = self._stream.record_event()
        return event


def multiplications_per_byte(device: torch.device) -> float:
    """Multiply-accumulates of a 3x3 convolution in the time in which a byte is copied to the host, or back.

    It is the nearest power of two, since measured times differ from one process to the next.
    """
    found = device_at_rest(device)
    if found is None:
        raise ValueError(f"{device} has no memory of its own")
    values = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=device)
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    images, weight = torch.ones(_MEASURED_SHAPE, device=device), torch.ones(64, 64, 3, 3, device=device)

    def copy() -> None:
        for _ in range(_MEASURED_TIMES):
            host.copy_(values, non_blocking=True)
            values.copy_(host, non_blocking=True)

    def convolve() -> None:
        for _ in range(_MEASURED_TIMES):
            F.conv2d(images, weight, padding=1)

    for work in (copy, convolve):
        work()  # loads kernels, and takes host memory
    byte = found.memory.seconds(copy) / (2 * _MEASURED_TIMES * _MEASURED_BYTES)
    multiplication = found.memory.seconds(convolve) / (_MEASURED_TIMES * images.numel() * weight[0].numel())
    return float(2 ** round(math.log2(byte / multiplication)))


def keeps_pages_on_host(device: torch.device | str) -> bool:
    """Whether pages of a device go to host memory: it is not the device's own."""
    found = device_at_rest(torch.device(device)) if has_own_memory(device) else None
    return found is not None and not found.memory.unified
