"""What a run takes of a device with a memory of its own, by kind."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit._quantities import format_bytes


@dataclass(frozen=True)
class DevicePlan:
    """Bytes of a device: at rest, and at the largest peak of planning.

    Attributes:
        context_bytes: context and libraries at rest; they count to the budget.
        source: how they were found.
        reserved_bytes, allocated_bytes: what the allocator held at the largest measured peak, and tensors had of it.
        free_bytes, total_bytes: of the device, when the plan was made.
        unified: whether the processor has the same memory, so that the budget covers both.
    """

    context_bytes: int
    source: str
    reserved_bytes: int
    allocated_bytes: int
    free_bytes: int
    total_bytes: int
    unified: bool = False

    def parts(self, peak_bytes: int) -> dict[str, int]:
        """A predicted peak by kind; tensors have the share of the reserve that they had when it was measured."""
        reserve = max(peak_bytes - self.context_bytes, 0)
        tensors = reserve * self.allocated_bytes // self.reserved_bytes if self.reserved_bytes else reserve
        context = peak_bytes - reserve
        return {
            "context_bytes": context,
            "reserve_bytes": reserve,
            "tensor_bytes": tensors,
            "fragmentation_bytes": reserve - tensors,
        }

    def text(self, peak_bytes: int) -> str:
        """The same for people."""
        parts = {name: format_bytes(size) for name, size in self.parts(peak_bytes).items()}
        return (
            f"Device memory: {parts['context_bytes']} context and libraries + {parts['reserve_bytes']} reserve "
            f"({parts['tensor_bytes']} tensors, {parts['fragmentation_bytes']} fragmentation) = "
            f"{format_bytes(peak_bytes)} at the peak. "
            f"{format_bytes(self.free_bytes)} of {format_bytes(self.total_bytes)} are free"
            + (", and host and device share them." if self.unified else ".")
        )
