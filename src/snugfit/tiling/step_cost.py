"""What every process computes, sends, waits for and keeps in a training step, and the seconds that it takes.

A step is a sequence of stages, each an exchange and then work. Speeds and links are those of a measured cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from snugfit._core.hardware import Cluster, Link

GATEWAY = 0
"""Rank of the process that has images, labels and the rest of the network."""

FLOAT = 4
"""Bytes."""

DIRECT = 4
"""Up to this many processes send sums of norms directly to each other: half the time of a collective."""

Kind = Literal[
    "images", "forward halo", "norms", "last map", "rest", "gradient", "backward halo", "recompute halo", "weights"
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


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step: stages in order, and for each process kept bytes and number of tiles.

    Kept are the feature maps that the forward pass leaves to the backward pass.
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
        return sum(count for (source, _), count in self._messages(*kinds) if source == rank)

    def received(self, rank: int, *kinds: Kind) -> int:
        """Number of floats that a process receives, of all kinds or of some."""
        return sum(count for (_, target), count in self._messages(*kinds) if target == rank)

    def total(self, *kinds: Kind) -> int:
        """Number of floats that all processes send, of all kinds or of some."""
        return sum(count for _, count in self._messages(*kinds))

    def _messages(self, *kinds: Kind) -> list[tuple[tuple[int, int], int]]:
        return [each for stage in self.stages if not kinds or stage.kind in kinds for each in stage.messages.items()]


@dataclass(frozen=True)
class Span:
    """Seconds of a stage: until all messages have arrived, and of the slowest process."""

    stage: Stage
    sending: float
    computing: float


@dataclass(frozen=True)
class Prediction:
    """Duration of a step on a measured cluster; at the end of each stage all processes wait for the slowest."""

    cost: StepCost
    cluster: Cluster

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Seconds of every stage; raises a ``UsageError`` if a link was not measured."""
        return tuple(Span(stage, self._sending(stage), self._computing(stage)) for stage in self.cost.stages)

    @property
    def seconds(self) -> float:
        """Duration of the whole step."""
        return self.computing() + self.sending()

    def part(self, part: Pass) -> float:
        """Seconds of a part of the step, without the all-reduce of weights' gradients."""
        spans = (span for span in self.spans if span.stage.part == part and span.stage.kind != "weights")
        return sum(span.sending + span.computing for span in spans)

    def computing(self) -> float:
        """Seconds of computation on the slowest process of each stage."""
        return sum(span.computing for span in self.spans)

    def sending(self, *kinds: Kind) -> float:
        """Seconds of messages, of all kinds or of some."""
        return sum(span.sending for span in self.spans if not kinds or span.stage.kind in kinds)

    def _computing(self, stage: Stage) -> float:
        speeds = (rank.macs_per_second for rank in self.cluster.ranks)
        return max(macs / speed for macs, speed in zip(stage.macs, speeds, strict=False))

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        return {(link.source, link.target): link for link in self.cluster.links}

    def _sending(self, stage: Stage) -> float:
        """Seconds until the busiest network port has passed everything on, plus one latency per round."""
        ports, latency = defaultdict[object, float](float), 0.0
        for (source, target), floats in stage.messages.items():
            if not floats:
                continue
            link = self._links.get((source, target)) or self.cluster.link(source, target)
            seconds, latency = FLOAT * floats / link.bytes_per_second, max(latency, link.latency_seconds)
            out, into = self._ports(source, target)
            ports["out", out] += seconds
            ports["in", into] += seconds
        return max(ports.values(), default=0.0) + stage.rounds * latency

    def _ports(self, source: int, target: int) -> tuple[int | str, int | str]:
        """The ports that a message passes: one per host; processes on one host do not share a port."""
        hosts = self.cluster.ranks[source].host, self.cluster.ranks[target].host
        return (source, target) if hosts[0] == hosts[1] else hosts
