"""Grouping profiles, their costs, and the cheapest one: sections 5.1 and 5.2 of Rama and Gerstlauer (UT-CERC-24-02).

Tiles run the layers of a group without an exchange. Forward, the tile of a group's last feature map needs a halo of its
first one. Backward, the tile of the first gradient needs a halo of the last one. Computation counts the region that a
layer produces. Each direction has its own profile.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from snugfit._core.hardware import Cluster, Link
from snugfit.errors import UsageError
from snugfit.tiling.layers import Layers, Region, Tiling
from snugfit.tiling.step_cost import FLOAT, GATEWAY

_GROUP = re.compile(r"(\d+)-(\d+)")
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Profile:
    """Consecutive groups of layers; halos are exchanged at the first feature map of each, backward at the last.

    Attributes:
        cuts: numbers of the feature maps between groups, including the first and the last feature map.
    """

    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.cuts) < 2 or any(a >= b for a, b in pairwise(self.cuts)):
            raise UsageError(f"the cuts of a grouping profile must rise, and be two at least, not {self.cuts}.")

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """First and last feature map of every group."""
        return tuple(pairwise(self.cuts))

    def __str__(self) -> str:
        """As ``0-4 | 4-11 | 11-16``."""
        return " | ".join(f"{start}-{stop}" for start, stop in self.groups)

    @classmethod
    def parse(cls, text: str, cuts: Sequence[int]) -> Profile:
        """Parse a printed profile, such as ``0-4 | 4-11 | 11-16``, whose groups meet at some of these cuts.

        Raises:
            UsageError: it is not a profile, does not span all layers, or has a cut that is not allowed.
        """
        found = [_GROUP.fullmatch(part.strip()) for part in text.split("|")]
        groups = [(int(each[1]), int(each[2])) for each in found if each]
        joined = all(before[1] == after[0] for before, after in pairwise(groups))
        if len(groups) < len(found) or not joined:
            raise UsageError(f"'{text}' is no grouping profile; write groups of layers like 0-4 | 4-11 | 11-16.")
        profile = cls((groups[0][0], *(stop for _, stop in groups)))
        strange = sorted({*profile.cuts} - {*cuts})
        if strange or (profile.cuts[0], profile.cuts[-1]) != (cuts[0], cuts[-1]):
            raise UsageError(
                f"the grouping profile {profile} must go from {cuts[0]} to {cuts[-1]}, and groups may meet at "
                f"{', '.join(map(str, cuts))} only."
            )
        return profile


def one_group(cuts: Sequence[int]) -> Profile:
    """All layers in one group: one exchange of halos."""
    return Profile((cuts[0], cuts[-1]))


def every_cut(cuts: Sequence[int]) -> Profile:
    """A group per layer: nothing is computed twice."""
    return Profile(tuple(cuts))


def named_profile(text: str, cuts: Sequence[int]) -> Profile:
    """Parse ``one``, ``every`` or a printed profile; raises as :meth:`Profile.parse` does."""
    named = {"one": one_group, "every": every_cut}
    return named[text](cuts) if text in named else Profile.parse(text, cuts)


@dataclass(frozen=True)
class Work:
    """Work of a tile in a group.

    Attributes:
        macs: multiply-accumulates, including those that neighbours compute too.
        elements: values of the halo that it receives.
        syncs: times that it waits for others: for its halo, and for sums over whole feature maps.
    """

    macs: int = 0
    elements: int = 0
    syncs: int = 0


@dataclass(frozen=True)
class Prices:
    """Costs per unit of work: seconds, or the abstract numbers of section 5.1.

    Attributes:
        mac: per multiply-accumulate, c_p.
        element: per value sent, c_c.
        sync: per synchronisation, c_f.
    """

    mac: float
    element: float
    sync: float = 0.0

    def of(self, work: Work) -> float:
        """Cost of some work."""
        return self.mac * work.macs + self.element * work.elements + self.sync * work.syncs


def prices_of(cluster: Cluster, owners: Sequence[int]) -> list[Prices]:
    """Prices in seconds of every tile, by the rank that runs it; tiles of one process run one after another.

    A value travels over the slowest link to another process with tiles. Processes of one host share its network
    interface.

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


def _regions(
    layers: Layers, span: tuple[int, int], core: Region, direction: Direction, *, clip: bool = True
) -> dict[int, Region]:
    """The region of each feature map, or gradient, between two cuts that a tile needs to make its core."""
    start, stop = span
    if direction == "forward":
        return layers.needed(start, stop, {stop: core}, clip=clip)
    return layers.reached(start, stop, core, clip=clip)


def group_work(
    layers: Layers, start: int, stop: int, core: Region, direction: Direction, *, own: Region, clip: bool = True
) -> Work:
    """Work of a tile between two cuts.

    Args:
        layers: the network.
        start, stop: cuts.
        core: the tile's part of the feature map that the group makes: map ``stop`` forward, the gradient of map
            ``start`` backward.
        direction: which pass.
        own: the tile's part of the feature map that is exchanged; it is not sent.
        clip: whether to leave out what lies outside feature maps; if not, the tile is assumed to have eight neighbours.
    """
    regions = _regions(layers, (start, stop), core, direction, clip=clip)
    exchanged = start if direction == "forward" else stop
    macs = sums = 0
    for number in range(start, stop):
        layer = layers.layers[number]
        if direction == "forward":
            macs += regions[number + 1].area * layer.macs if number + 1 in regions else 0
        else:  # as many products per pixel of the gradient as layers read it
            macs += regions[layer.reads[0]].area * layer.macs // layer.strides
        sums += layer.sums > 0
    elements = layers.maps[exchanged].channels * (regions[exchanged].area - (own & regions[exchanged]).area)
    with_halo = layers.layers[start if direction == "forward" else stop - 1].sums > 0  # its sums travel with the halo
    return Work(macs, elements, max(sums, 1) if elements and with_halo else (elements > 0) + sums)


@dataclass(frozen=True)
class CostModel:
    """Costs of groups for the tiles of a network; a group takes as long as its slowest tile.

    Attributes:
        tiling: the network and its tiles.
        prices: of the device that runs each tile, in the order of ``tiling.tiles``; or one for all.
        batch: images.
        owners: the rank that runs each tile. With owners, the gateway, rank 0, sends the parts of the first feature map
            and of the last one's gradient one after another over its own link. Without, these are already there, and
            only halos are sent, as in section 5.1.
    """

    tiling: Tiling
    prices: Sequence[Prices]
    batch: int = 1
    owners: Sequence[int] | None = None
    _known: dict[tuple[int, int, Direction], float] = field(default_factory=dict, compare=False, repr=False)

    def work(self, start: int, stop: int, direction: Direction) -> list[Work]:
        """Work of every tile in a group, for one image."""
        made, exchanged = (stop, start) if direction == "forward" else (start, stop)
        core = self.tiling.core
        return [
            group_work(self.tiling.layers, start, stop, core(made, tile), direction, own=core(exchanged, tile))
            for tile in self.tiling.tiles
        ]

    def group(self, start: int, stop: int, direction: Direction) -> float:
        """Cost of a group for a batch."""
        key = (start, stop, direction)
        if key not in self._known:
            prices = list(self.prices) * (len(self.tiling.tiles) if len(self.prices) == 1 else 1)
            works, sent, last = self.work(start, stop, direction), 0.0, len(self.tiling.layers.layers)
            if self.owners is not None and (start == 0 if direction == "forward" else stop == last):
                sent = self._from_gateway(start, stop, direction, prices)
                works = [replace(work, elements=0) for work in works]
            costs = [
                price.of(Work(self.batch * work.macs, self.batch * work.elements, work.syncs))
                for price, work in zip(prices, works, strict=True)
            ]
            self._known[key] = self.batch * sent + max(costs)
        return self._known[key]

    def _from_gateway(self, start: int, stop: int, direction: Direction, prices: Sequence[Prices]) -> float:
        """Cost of what the gateway sends to other processes' tiles for the first group of a pass, including halos."""
        assert self.owners is not None
        layers, tiles, cost = self.tiling.layers, Counter(self.owners), 0.0
        made, sent = (stop, start) if direction == "forward" else (start, stop)
        for tile, owner, price in zip(self.tiling.tiles, self.owners, prices, strict=True):
            regions = _regions(layers, (start, stop), self.tiling.core(made, tile), direction)
            if owner != GATEWAY and sent in regions:  # a price counts the tiles that its process has
                cost += layers.maps[sent].channels * regions[sent].area * price.element / tiles[owner]
        return cost

    def total(self, profile: Profile, direction: Direction) -> float:
        """Cost of a profile (equation 5.1)."""
        return sum(self.group(start, stop, direction) for start, stop in profile.groups)

    def cheapest(self, direction: Direction, cuts: Sequence[int] | None = None) -> Profile:
        """The profile of least cost (section 5.2), over all cuts or some."""
        return cheapest(cuts or self.tiling.layers.cuts, lambda start, stop: self.group(start, stop, direction))


def cheapest(cuts: Sequence[int], cost: Callable[[int, int], float]) -> Profile:
    """The shortest path over cuts, group by group (Algorithm 2); among equals the one with the fewest groups.

    The graph has no cycles, so one pass over its vertices finds what Dijkstra's algorithm finds.
    """
    paths: dict[int, tuple[float, int, tuple[int, ...]]] = {cuts[0]: (0.0, 0, (cuts[0],))}
    for index, stop in enumerate(cuts[1:], 1):
        before = [(cost(start, stop), *paths[start]) for start in cuts[:index]]
        paths[stop] = min((spent + price, groups + 1, (*path, stop)) for price, spent, groups, path in before)
    return Profile(paths[cuts[-1]][-1])
