"""What every process computes, sends, waits for and keeps in a training step.

Stages, each an exchange and then work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GATEWAY = 0
"""Rank of the process that has images, labels and the rest of the network."""

FLOAT = 4
"""Bytes."""

DIRECT = 4
"""Up to this many processes send sums of norms directly to each other: half the time of a collective."""

Kind = Literal[
    "images", "forward halo", "norms", "last map", "rest", "gradient", "backward halo", "maps anew", "weights"
]
"""What travels: a batch from the gateway, halos, sums of norms, the last feature map, nothing for the layers behind it,
its gradient from the gateway, halos of recomputed feature maps, gradients of weights."""
Pass = Literal["forward", "backward", "recompute"]
Messages = Mapping[tuple[int, int], int]
"""Floats from one rank to another."""


@dataclass(frozen=True)
class Stage:
    """An exchange, and the computation until the next one.

    Attributes:
        kind: what travels.
        part: of the step.
        messages: number of floats from each rank to each other one.
        macs: of every process.
        rounds: number of messages that wait for each other; several in a ring of collectives.
    """

    kind: Kind
    part: Pass
    messages: Messages
    macs: tuple[int, ...]
    rounds: int = 1

    def sent(self, rank: int) -> int:
        """Number of floats that a process sends."""
        return sum(count for (source, _), count in self.messages.items() if source == rank)

    def received(self, rank: int) -> int:
        """Number of floats that a process receives."""
        return sum(count for (_, target), count in self.messages.items() if target == rank)


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step on all processes.

    Attributes:
        stages: in order.
        kept_bytes: of every process, of the feature maps that the forward pass keeps for the backward pass.
        tiles: of every process, in all its shares of the batch.
    """

    stages: tuple[Stage, ...]
    kept_bytes: tuple[int, ...]
    tiles: tuple[int, ...]

    @property
    def processes(self) -> int:
        """Number of processes."""
        return len(self.tiles)

    @property
    def synchronisations(self) -> int:
        """Number of exchanges in which anything is sent."""
        return sum(any(stage.messages.values()) for stage in self.stages)

    def macs(self, rank: int, part: Pass | None = None) -> int:
        """Multiply-accumulates of a process, in the whole step or a part."""
        return sum(stage.macs[rank] for stage in self.stages if part in (None, stage.part))

    def sent(self, rank: int, *kinds: Kind) -> int:
        """Number of floats that a process sends, of all kinds or of some."""
        return sum(stage.sent(rank) for stage in self.stages if not kinds or stage.kind in kinds)

    def received(self, rank: int, *kinds: Kind) -> int:
        """Number of floats that a process receives, of all kinds or of some."""
        return sum(stage.received(rank) for stage in self.stages if not kinds or stage.kind in kinds)

    def total(self, *kinds: Kind) -> int:
        """Number of floats that all processes send, of all kinds or of some."""
        return sum(self.sent(rank, *kinds) for rank in range(self.processes))


def all_reduced(floats: int, processes: int) -> Messages:
    """Messages of an all-reduce by a ring.

    Every process passes on every other part, to add up and then to distribute.
    """
    return _ring(-(-2 * (processes - 1) * floats // processes), processes)


def all_gathered(floats: int, processes: int) -> Messages:
    """Messages of an all-gather by a ring."""
    return _ring((processes - 1) * floats, processes)


def all_to_all(floats: int, processes: int) -> Messages:
    """Messages of an all-gather by direct messages between all processes."""
    pairs = ((source, target) for source in range(processes) for target in range(processes) if source != target)
    return dict.fromkeys(pairs, floats) if floats else {}


def _ring(floats: int, processes: int) -> Messages:
    return {(rank, (rank + 1) % processes): floats for rank in range(processes)} if processes > 1 and floats else {}
