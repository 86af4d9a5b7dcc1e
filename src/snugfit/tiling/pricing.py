"""Seconds that measured devices and links take for tiles, from the file that ``snugfit cluster doctor`` writes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from snugfit._core.hardware import Cluster, Link
from snugfit.tiling.grouping import Prices
from snugfit.tiling.step_cost import FLOAT, Kind, Pass, Stage, StepCost


def prices_of(cluster: Cluster, owners: Sequence[int]) -> list[Prices]:
    """Prices of every tile for :class:`CostModel`; tiles of one process run one after another.

    A value travels over the slowest link to another process with tiles. Processes of one host share its network
    interface.

    Args:
        cluster: the processes.
        owners: the rank that runs each tile.

    Raises:
        UsageError: a link between two of them was not measured.
    """
    tiles, known = Counter(owners), dict[int, Prices]()
    for rank, count in tiles.items():
        others = [other for other in tiles if other != rank]
        links = [cluster.link(*pair) for other in others for pair in ((rank, other), (other, rank))]
        element = max((FLOAT * _sharing(cluster, link, tiles) / link.bytes_per_second for link in links), default=0.0)
        sync = max((link.latency_seconds for link in links), default=0.0)
        known[rank] = Prices(count / cluster.ranks[rank].macs_per_second, count * element, sync)
    return [known[rank] for rank in owners]


def _sharing(cluster: Cluster, link: Link, tiles: Counter[int]) -> int:
    """Number of processes with tiles that share the source's interface to other hosts."""
    host = cluster.ranks[link.source].host
    if cluster.ranks[link.target].host == host:
        return 1
    return sum(cluster.ranks[rank].host == host for rank in tiles)


def shares_by_speed(grid: tuple[int, int], speeds: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Weights of a grid's rows and columns that bring tiles closest to the speeds of their devices.

    A device alone in its row and column gets exactly its share.

    Args:
        grid: tiles down and across.
        speeds: of every tile's device, row by row.
    """
    down, across = grid
    rows = tuple(sum(speeds[row * across : (row + 1) * across]) for row in range(down))
    columns = tuple(sum(speeds[column::across]) for column in range(across))
    return rows, columns


@dataclass(frozen=True)
class Span:
    """Seconds of a stage.

    Attributes:
        stage: the stage.
        sending: until all messages have arrived.
        computing: of the slowest process.
    """

    stage: Stage
    sending: float
    computing: float


@dataclass(frozen=True)
class Prediction:
    """Duration of a step, stage by stage; at the end of each all processes wait for the slowest.

    Attributes:
        cost: of the step.
        cluster: the processes.
    """

    cost: StepCost
    cluster: Cluster
    _links: dict[tuple[int, int], Link] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._links.update({(link.source, link.target): link for link in self.cluster.links})

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Seconds of every stage.

        Raises:
            UsageError: a link was not measured.
        """
        return tuple(Span(stage, self._sending(stage), self._computing(stage)) for stage in self.cost.stages)

    @property
    def seconds(self) -> float:
        """Duration of the whole step."""
        return self.computing() + self.sending()

    def part(self, part: Pass) -> float:
        """Seconds of a part of the step, without the all-reduce of weights' gradients."""
        return sum(
            span.sending + span.computing
            for span in self.spans
            if span.stage.part == part and span.stage.kind != "weights"
        )

    def computing(self) -> float:
        """Seconds of computation on the slowest process of each stage."""
        return sum(span.computing for span in self.spans)

    def sending(self, *kinds: Kind) -> float:
        """Seconds of messages, of all kinds or of some."""
        return sum(span.sending for span in self.spans if not kinds or span.stage.kind in kinds)

    def _computing(self, stage: Stage) -> float:
        speeds = (rank.macs_per_second for rank in self.cluster.ranks)
        return max(macs / speed for macs, speed in zip(stage.macs, speeds, strict=False))

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
        """The ports that a message passes.

        One network interface per host; processes on one host do not share a port.
        """
        hosts = self.cluster.ranks[source].host, self.cluster.ranks[target].host
        return (source, target) if hosts[0] == hosts[1] else hosts
