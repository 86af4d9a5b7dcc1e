"""The memory of a run: of its processes at rest, of what the machine has for them, and of a device of its own."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit._core.machine_memory import MachineMemory
from snugfit._quantities import MB, format_bytes

MARGIN_BYTES = 2 * MB
"""What the resting processes may grow by in a run: the command line, and the stack of the process that trains."""


@dataclass(frozen=True)
class RunMemory:
    """Bytes at rest, before model and data exist, and the machine's memory for the run, those bytes included.

    Attributes:
        process_bytes: the process that trains: the baseline of its budget.
        other_bytes: the other processes of the run, such as the command line, which waits.
        machine: what the machine has for the run.
        mapped_bytes: mapped files, such as library code, that a step of training reads; all that are mapped where the
            kernel does not tell.
    """

    process_bytes: int
    other_bytes: int
    machine: MachineMemory
    mapped_bytes: int = 0

    @property
    def rest_bytes(self) -> int:
        """All processes at rest."""
        return self.process_bytes + self.other_bytes

    @property
    def auto_bytes(self) -> int:
        """The total that ``auto`` stands for: what the machine has, less the mapped files that every step reads.

        Where memory is short the kernel drops the other files, and they are read from disk again when they are used.
        Files that every step reads must stay: a run that waits for the disk in every step would not end.
        """
        return max(self.machine.free_bytes - self.mapped_bytes, 1)

    @property
    def headroom_bytes(self) -> int:
        """What the machine has above the processes at rest; below zero if it lacks memory for these."""
        return self.machine.free_bytes - self.total_for(0)

    def total_for(self, growth_bytes: int) -> int:
        """The budget of all processes that leaves so many bytes above those at rest."""
        return -(-(self.rest_bytes + MARGIN_BYTES) // MB) * MB + growth_bytes

    def growth_in(self, total_bytes: int) -> int:
        """What a budget of all processes leaves above those at rest, in whole MB; 1 MB, in which nothing fits, if less.

        Whole MB, because processes at rest differ by some 100 kB, and a plan must not.
        """
        return max((total_bytes - self.total_for(0)) // MB, 1) * MB


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
