"""Enforce a memory budget: by RLIMIT_DATA on the processor, by the allocator on devices with a memory of their own."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType

import torch
from torch.utils.hooks import RemovableHandle

from snugfit.errors import UsageError
from snugfit.memory.address_space import KERNEL_BYTES, KernelAllowance, allow_batch_norm_backward
from snugfit.memory.device import DeviceUse, device_at_rest, has_own_memory
from snugfit.memory.process import Baseline, MemoryStatus, late_bytes, mapped_bytes, read_status

HOST_STEP_BYTES, HOST_STEP_SHARE = 64_000_000, 8
"""Where host and device share one memory, the process may grow by so much between two updates of the limit, or by that
part of the headroom if it is less; the allocator has the rest. So both together stay within the budget."""


def can_enforce(device: torch.device) -> bool:
    """Whether a budget on ``device`` is enforced here, in addition to being predicted and measured."""
    return has_own_memory(device) or sys.platform.startswith("linux")


class MemoryLimit:
    """Context in which the process cannot grow past ``budget_bytes`` above its baseline.

    On the processor the soft ``RLIMIT_DATA`` allows exactly what the budget has left, so that an allocation beyond it
    fails as a catchable error; it is restored afterwards. On a device with a memory of its own, such as a GPU, the
    caching allocator gets what the budget leaves after context and libraries; there ``host_bytes`` bounds what the
    process may add to its baseline. Where both share one memory, the budget covers both.

    ``RLIMIT_DATA`` counts mappings whether or not they are resident, and oneDNN reserves 0.25-1.5 MB of address space
    for each generated kernel of which it touches some 20 kB. :meth:`refresh` therefore updates the limit from mapped
    and resident memory at every step. Pages that the heap has returned stay mapped, and tensors may use them again
    without being refused; where the heap keeps freed memory, ``FreedMemory`` checks the budget at every layer, too.

    What libraries import inside the context belongs to the process at rest, unless ``counts_imports``: then it takes
    from the budget, although the import itself is not refused.
    """

    def __init__(
        self,
        budget_bytes: int | None,
        baseline: Baseline,
        device: torch.device,
        *,
        counts_imports: bool = False,
        host_bytes: int | None = None,
    ) -> None:
        self.budget_bytes, self.baseline, self.device = budget_bytes, baseline, device
        self._late_bytes = late_bytes() if counts_imports else None
        self.enforced = budget_bytes is not None and can_enforce(device)
        self.reserved_bytes = self._address_space_bytes = self._limit_bytes = 0
        self.host_bytes, self._device = host_bytes, device_at_rest(device)
        if host_bytes is not None and self._device is not None and self._device.memory.unified:
            raise UsageError("--host-memory: this GPU shares the memory of its host, and --memory bounds both.")
        self._previous: tuple[int, int] | None = None
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> MemoryLimit:
        if self._bounds_process():
            self._previous = resource.getrlimit(resource.RLIMIT_DATA)
            self._hook = None if self._device else allow_batch_norm_backward(self)
        self.refresh()
        return self

    def _bounds_process(self) -> bool:
        if not sys.platform.startswith("linux"):
            return False
        if self._device is None or self._device.memory.unified:
            return self.enforced
        return self.host_bytes is not None

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserve a part of the budget temporarily, so that what fits now also fits later with a margin."""
        self.reserved_bytes += size
        self.refresh()
        try:
            yield
        finally:
            self.reserved_bytes -= size
            self.refresh()

    @contextmanager
    def allow_address_space(self, size: int) -> Iterator[None]:
        """Allow extra address space that is reserved but hardly touched, such as a thread's stack."""
        self._address_space_bytes += size
        self.refresh()
        try:
            yield
        finally:
            self._address_space_bytes -= size
            self.refresh()

    @property
    def kernel_bytes(self) -> int:
        """Bytes that operators must have left inside of :meth:`allow_kernels`, beside their outputs."""
        return KERNEL_BYTES if self._generates_kernels else 0

    @property
    def _generates_kernels(self) -> bool:
        return self._previous is not None and self._device is None

    @property
    def left_bytes(self) -> int:
        """Headroom: bytes of the budget that are not resident, minus ``reserved_bytes``; 0 without a budget."""
        return self._left(read_status())

    def _left(self, status: MemoryStatus) -> int:
        budget = (self.budget_bytes or 0) - self.reserved_bytes
        if self._device is None:
            return max(budget - self._growth(status), 0)
        use = self._device.memory.read()
        return max(budget - self._taken(use, status) - use.reserved, 0)

    def _taken(self, use: DeviceUse, status: MemoryStatus) -> int:
        """What the budget holds besides the allocator's reserve: the context, and the process in a unified memory."""
        assert self._device is not None
        of_process = self._growth(status) + use.pinned if self._device.memory.unified else 0
        return self._device.context_in(use) + of_process

    @property
    def resting_bytes(self) -> int:
        """Private memory of the process at rest, above which its growth counts."""
        return self.baseline.anon + (late_bytes() if self._late_bytes is None else self._late_bytes)

    def _growth(self, status: MemoryStatus) -> int:
        return max(status.anon - self.resting_bytes, 0)

    def _refresh_device(self, status: MemoryStatus) -> int:
        """Set the allocator's limit; returns what the process may add meanwhile."""
        assert self._device is not None
        memory, use = self._device.memory, self._device.memory.read()
        allowed = (self.budget_bytes or 0) - self.reserved_bytes - self._taken(use, status)
        of_process = 0
        if memory.unified:
            of_process = max(min((allowed - use.reserved) // HOST_STEP_SHARE, HOST_STEP_BYTES), 0)
        elif self.host_bytes is not None:
            of_process = max(self.host_bytes - self._growth(status) - use.pinned, 0)
        if self.enforced:
            memory.limit(max(allowed - (of_process if memory.unified else 0), 0))
        return of_process

    def refresh(self, extra_bytes: int = 0) -> int:
        """Set the limit to the headroom plus some address space; returns the bytes that are mapped but not resident."""
        if self._previous is None and self._device is None:
            return 0
        status = read_status()
        left = self._left(status) if self._device is None else self._refresh_device(status)
        if self._previous is None:
            return 0
        hard = self._previous[1]
        limit = status.data + left + extra_bytes + self._address_space_bytes
        self._limit_bytes = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (self._limit_bytes, hard))
        return status.data - status.anon

    def has_address_space(self, size: int) -> bool:
        """Whether so many bytes can be mapped before the next :meth:`refresh`; it takes some microseconds."""
        return self._previous is None or mapped_bytes() + size <= self._limit_bytes

    @contextmanager
    def allow_kernels(self) -> Iterator[None]:
        """Context for work on shapes that are new to the process: see :class:`KernelAllowance`."""
        with KernelAllowance(self) if self._generates_kernels else nullcontext():
            yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self._previous is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._previous)
            self._previous = self._hook = None
        if self._device is not None and self.enforced:
            self._device.memory.limit(None)
