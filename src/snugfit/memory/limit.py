"""Enforce a memory budget: by RLIMIT_DATA on the processor, by the caching allocator on CUDA."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch.utils.hooks import RemovableHandle

from snugfit.memory.address_space import KERNEL_BYTES, KernelAllowance, allow_batch_norm_backward
from snugfit.memory.process import Baseline, MemoryStatus, late_bytes, read_status


def can_enforce(device: torch.device) -> bool:
    """Whether a budget on ``device`` is enforced here, in addition to being predicted and measured."""
    return device.type == "cuda" or sys.platform.startswith("linux")


class MemoryLimit:
    """Context in which the process cannot grow past ``budget_bytes`` above its baseline.

    On the processor the soft ``RLIMIT_DATA`` allows exactly what the budget has left, so that an allocation beyond it
    fails as a catchable error; it is restored afterwards. On CUDA the allocator's fraction is set.

    ``RLIMIT_DATA`` counts mappings whether or not they are resident, and oneDNN reserves 0.25-1.5 MB of address space
    for each generated kernel of which it touches some 20 kB. :meth:`refresh` therefore updates the limit from mapped
    and resident memory at every step.

    What libraries import inside the context belongs to the process at rest, unless ``counts_imports``: then it takes
    from the budget, although the import itself is not refused.
    """

    def __init__(
        self, budget_bytes: int | None, baseline: Baseline, device: torch.device, *, counts_imports: bool = False
    ) -> None:
        self.budget_bytes, self.baseline, self.device = budget_bytes, baseline, device
        self._late_bytes = late_bytes() if counts_imports else None
        self.enforced = budget_bytes is not None and can_enforce(device)
        self.reserved_bytes = self._address_space_bytes = 0
        self._previous: tuple[int, int] | None = None
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> MemoryLimit:
        if self.enforced and self.budget_bytes is not None and self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(self.budget_bytes / total, 1.0), self.device)
        elif self.enforced:
            self._previous = resource.getrlimit(resource.RLIMIT_DATA)
            self._hook = allow_batch_norm_backward(self)
            self.refresh()
        return self

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
        """Bytes that :meth:`allow_kernels` reserves."""
        return 0 if self._previous is None else KERNEL_BYTES

    @property
    def left_bytes(self) -> int:
        """Headroom: bytes of the budget that are not resident, minus ``reserved_bytes``; 0 without a budget."""
        return self._left(read_status())

    def _left(self, status: MemoryStatus) -> int:
        budget = (self.budget_bytes or 0) - self.reserved_bytes
        late = late_bytes() if self._late_bytes is None else self._late_bytes
        return max(budget - max(status.anon - late - self.baseline.anon, 0), 0)

    def refresh(self, extra_bytes: int = 0) -> int:
        """Set the limit to the headroom plus some address space; returns the bytes that are mapped but not resident."""
        if self._previous is None:
            return 0
        status = read_status()
        hard = self._previous[1]
        limit = status.data + self._left(status) + extra_bytes + self._address_space_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        return status.data - status.anon

    @contextmanager
    def allow_kernels(self) -> Iterator[None]:
        """Context for work on shapes that are new to the process: see :class:`KernelAllowance`.

        Space for kernels is reserved from everything else, so that the budget holds even if it is touched.
        """
        if self._previous is None:
            yield
            return
        with self.reserve(KERNEL_BYTES), KernelAllowance(self):
            yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self._previous is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._previous)
            self._previous = self._hook = None
        elif self.enforced and self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
