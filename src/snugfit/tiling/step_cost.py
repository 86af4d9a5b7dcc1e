"""What every process computes, sends, waits for and keeps in a training step: stages, each exchange and then work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FLOAT = 4
"""Bytes."""

DIRECT = 4
"""Processes up to which everyone sends sums of norms to everyone: a message takes half of the time of a collective."""

Kind = Literal[
    "images", "forward halo", "norms", "last map", "rest", "gradient", "backward halo", "maps anew", "weights"
]
"""What travels: a batch from the gateway, halos, sums of norms, the last map to the gateway or to everyone, nothing for
the layers behind it, its gradient from the gateway, halos of what is recomputed, gradients of weights."""
Pass = Literal["forward", "backward", "recompute"]
Messages = Mapping[tuple[int, int], int]
"""Floats from one rank to another."""


@dataclass(frozen=True)
class Stage:
    """An exchange, and what is computed behind it before the next one.

    Attributes:
        kind: what travels.
        part: of the step.
        messages: who sends whom how many floats.
        macs: of every process.
        rounds: messages that wait for each other, one after another; a ring of collectives has several.
    """

    kind: Kind
    part: Pass
    messages: Messages
    macs: tuple[int, ...]
    rounds: int = 1

    def sent(self, rank: int) -> int:
        """Floats that a process sends others."""
        return sum(count for (source, _), count in self.messages.items() if source == rank)

    def received(self, rank: int) -> int:
        """Floats that a process is sent."""
        return sum(count for (_, target), count in self.messages.items() if target == rank)


@dataclass(frozen=True)
class StepCost:
    """A training step of all processes.

    Attributes:
        stages: in order.
        kept_bytes: of every process, of the maps that the forward pass leaves for the backward pass.
        tiles: of every process, of all its shares of the batch.
    """

    stages: tuple[Stage, ...]
    kept_bytes: tuple[int, ...]
    tiles: tuple[int, ...]

    @property
    def processes(self) -> int:
        """How many there are."""
        return len(self.tiles)

    @property
    def synchronisations(self) -> int:
        """Exchanges in which something is sent at all, of halos, norms, images, maps and weights."""
        return sum(any(stage.messages.values()) for stage in self.stages)

    def macs(self, rank: int, part: Pass | None = None) -> int:
        """Multiply-accumulates of a process, in all or of a part of the step."""
        return sum(stage.macs[rank] for stage in self.stages if part in (None, stage.part))

    def sent(self, rank: int, *kinds: Kind) -> int:
        """Floats that a process sends, in all or of some kinds."""
        return sum(stage.sent(rank) for stage in self.stages if not kinds or stage.kind in kinds)

    def received(self, rank: int, *kinds: Kind) -> int:
        """Floats that a process is sent, in all or of some kinds."""
        return sum(stage.received(rank) for stage in self.stages if not kinds or stage.kind in kinds)

    def total(self, *kinds: Kind) -> int:
        """Floats that all processes send, in all or of some kinds."""
        return sum(self.sent(rank, *kinds) for rank in range(self.processes))


def all_reduced(floats: int, processes: int) -> Messages:
    """Sums that all have in the end, by a ring: everyone passes on every other part, once to add up, once to tell."""
    return _ring(-(-2 * (processes - 1) * floats // processes), processes)


def all_gathered(floats: int, processes: int) -> Messages:
    """What everyone has, told to all by a ring."""
    return _ring((processes - 1) * floats, processes)


def all_to_all(floats: int, processes: int) -> Messages:
    """The same, by messages from everyone to everyone."""
    pairs = ((source, target) for source in range(processes) for target in range(processes) if source != target)
    return dict.fromkeys(pairs, floats) if floats else {}


def _ring(floats: int, processes: int) -> Messages:
    return {(rank, (rank + 1) % processes): floats for rank in range(processes)} if processes > 1 and floats else {}
