"""The private memory of all processes of a run at rest, and what the machine has for them."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit._core.machine_memory import MachineMemory

MB = 10**6
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
