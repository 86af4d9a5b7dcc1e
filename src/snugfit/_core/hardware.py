"""The machine of a profile or plan, and the processes and links of a cluster."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from snugfit._core.documents import read_as
from snugfit._core.options import AUTO, DecodingThreads, checked
from snugfit._core.own_cores import usable_cores
from snugfit._core.serial import from_data, to_data
from snugfit.errors import UsageError


@dataclass(frozen=True)
class Hardware:
    """One device and the software on it.

    Attributes:
        device: ``"cpu"`` or ``"cuda:N"``.
        name: name of the processor or accelerator.
        memory_bytes: physical memory of the device.
        system: operating system and architecture.
        enforces: whether a memory budget can be enforced, not only predicted and measured.
    """

    device: str
    name: str
    threads: int
    memory_bytes: int
    system: str
    torch: str
    enforces: bool


def cores() -> int:
    """Cores available to this process."""
    return len(usable_cores())


def decoding_threads(workers: int | str) -> int:
    """Threads that decode images: ``workers``, or for ``"auto"`` one for each core, 2 at least and 8 at most.

    Raises:
        UsageError: it is neither ``"auto"`` nor a number of threads.
    """
    given = checked("workers", DecodingThreads, workers)
    return min(max(cores(), 2), 8) if given == AUTO else int(given)


def processor() -> str:
    """Name of the processor."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Rank:
    """One process.

    Attributes:
        rank: its number; 0 is the gateway.
        macs_per_second: multiply-accumulates per second of a 3x3 convolution, while all processes compute.
        free_bytes: available memory of the machine.
        cores: usable cores of the machine.
        clock_offset_seconds: offset of its clock from that of the gateway.
        versions: versions of ``snugfit``, ``torch`` and ``python``.
    """

    rank: int
    host: str
    threads: int
    macs_per_second: float
    free_bytes: int
    cores: int = 1
    clock_offset_seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """A network link from one rank to another; ``from`` and ``to`` in JSON.

    The bandwidth is that of large messages, the latency that of small ones in one direction.
    """

    source: int
    target: int
    bytes_per_second: float
    latency_seconds: float

    def seconds(self, count: float) -> float:
        """Time of a message of ``count`` bytes."""
        return self.latency_seconds + count / self.bytes_per_second


@dataclass(frozen=True)
class Cluster:
    """Processes in the order of their ranks, and a link from each to each other."""

    ranks: tuple[Rank, ...]
    links: tuple[Link, ...] = ()

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.ranks)

    def link(self, source: int, target: int) -> Link:
        """The link from one rank to another; raises UsageError if it was not measured."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise UsageError(
            f"the link from rank {source} to rank {target} was not measured; run `snugfit cluster doctor`."
        )

    def differing_versions(self) -> dict[str, tuple[str, ...]]:
        """Programs whose versions differ between ranks, with their versions by rank."""
        names = sorted({name for rank in self.ranks for name in rank.versions})
        versions_of = {name: tuple(rank.versions.get(name, "none") for rank in self.ranks) for name in names}
        return {name: versions for name, versions in versions_of.items() if len(set(versions)) > 1}

    def to_json(self) -> dict[str, Any]:
        """Keys ``ranks`` and ``links``; a link has ``from`` and ``to``."""
        links = [{"from": each.pop("source"), "to": each.pop("target"), **each} for each in map(to_data, self.links)]
        return {"ranks": to_data(self.ranks), "links": links}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cluster:
        """Inverse of :meth:`to_json`."""
        links = [{**link, "source": link["from"], "target": link["to"]} for link in data["links"]]
        return from_data(cls, {"ranks": data["ranks"], "links": links})


def read_cluster(path: str, processes: int | None = None) -> Cluster:
    """Read the output of ``snugfit cluster doctor --out`` for a number of processes, by default any."""
    cluster = read_as(Cluster.from_json, path, UsageError, "--cluster takes what `snugfit cluster doctor --out` wrote.")
    _check(cluster, path)
    if processes is not None and cluster.size != processes:
        raise UsageError(
            f"{path} describes {cluster.size} process{'es' * (cluster.size != 1)}, but there "
            f"{'is 1' if processes == 1 else f'are {processes}'} here;\n"
            "measure these with `snugfit cluster doctor --out`."
        )
    return cluster


def _check(cluster: Cluster, path: str) -> None:
    """Reject measurements from which no time can be computed."""
    again = "write one with `snugfit cluster doctor --out`"
    if not cluster.ranks or [each.rank for each in cluster.ranks] != list(range(cluster.size)):
        raise UsageError(f"{path} holds no processes in the order of their ranks; {again}.")
    speeds = [each.macs_per_second for each in cluster.ranks] + [each.bytes_per_second for each in cluster.links]
    if min(speeds) <= 0 or min((each.latency_seconds for each in cluster.links), default=0.0) < 0:
        raise UsageError(f"{path} holds a speed that is not above 0; {again}.")
    for source, target in permutations(range(cluster.size), 2):
        cluster.link(source, target)


def uniform_cluster(processes: int, rank: Rank, link: Link) -> Cluster:
    """A cluster of processes like ``rank``, each on its own host, with links like ``link``."""
    ranks = tuple(replace(rank, rank=each, host=f"{rank.host}-{each}") for each in range(processes))
    pairs = permutations(range(processes), 2)
    return Cluster(ranks, tuple(replace(link, source=source, target=target) for source, target in pairs))
