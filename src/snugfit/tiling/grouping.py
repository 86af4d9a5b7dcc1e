"""What a grouping profile costs, and the cheapest one: sections 5.1 and 5.2 of Rama and Gerstlauer (UT-CERC-24-02).

Forward, the tile of a group's last map needs a halo of its first one; backward, the tile of the first map's gradient
needs a halo of the last one's. Computation counts the region that a layer produces. Both
directions have a profile of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from snugfit.tiling.layers import Layer, Layers, Region, Tiling
from snugfit.tiling.profile import Profile

Direction = Literal["forward", "backward"]
GATEWAY = 0


@dataclass(frozen=True)
class Work:
    """What a tile does in a group.

    Attributes:
        macs: multiply-accumulates, of what its neighbours compute too as well.
        elements: values of the halo that it is sent.
        syncs: times that it waits for others: for its halo, where it has one, and for sums over whole maps.
    """

    macs: int = 0
    elements: int = 0
    syncs: int = 0


@dataclass(frozen=True)
class Prices:
    """What a device takes for its work: seconds, or the bare numbers of section 5.1.

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


def group_work(
    layers: Layers,
    start: int,
    stop: int,
    core: Region,
    direction: Direction,
    *,
    own: Region,
    clip: bool = True,
) -> Work:
    """What a tile does between two cuts.

    Args:
        layers: the network.
        start, stop: cuts.
        core: what belongs to the tile of the map that the group makes: of map ``stop`` forward, of the gradient of map
            ``start`` backward.
        direction: which pass.
        own: what belongs to the tile of the map that is exchanged, and need not be sent.
        clip: whether to leave out what lies outside maps; if not, the tile is taken to have eight neighbours.
    """
    if direction == "forward":
        regions, exchanged = layers.needed(start, stop, {stop: core}, clip=clip), start
    else:
        regions, exchanged = layers.reached(start, stop, core, clip=clip), stop
    macs = sums = 0
    for number in range(start, stop):
        layer = layers.layers[number]
        if direction == "forward":
            macs += regions[number + 1].area * layer.macs if number + 1 in regions else 0
        else:  # a pixel of the gradient takes part in as many products as its map's pixels are read
            macs += regions[layer.reads[0]].area * layer.macs // layer.strides
        sums += layer.sums > 0
    elements = layers.maps[exchanged].channels * (regions[exchanged].area - (own & regions[exchanged]).area)
    beside = layers.layers[start if direction == "forward" else stop - 1].sums > 0  # its sums travel beside the halo
    return Work(macs, elements, max(sums, 1) if elements and beside else (elements > 0) + sums)


@dataclass(frozen=True)
class CostModel:
    """Costs of groups for the tiles of a network.

    Attributes:
        tiling: the network and its tiles.
        prices: per tile, in the order of ``tiling.tiles``, of the device that runs it; or one for all.
        batch: images.
        worst: whether a group takes as long as its slowest tile, since all wait at its end; the mean of tiles else.
        owners: of every tile, the rank that runs it. With these, the gateway, rank 0, sends what others need of the
            first map, and of the last one's gradient, one after another over its own link; without, they are there, and
            only halos are sent, as in section 5.1.
    """

    tiling: Tiling
    prices: Sequence[Prices]
    batch: int = 1
    worst: bool = True
    owners: Sequence[int] | None = None
    _known: dict[tuple[int, int, Direction], float] = field(default_factory=dict, compare=False, repr=False)

    def work(self, start: int, stop: int, direction: Direction) -> list[Work]:
        """What every tile does in a group, for one image."""
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
            works, sent = self.work(start, stop, direction), 0.0
            if self.owners is not None and (start == 0 if direction == "forward" else stop == len(self._layers)):
                sent = self._from_gateway(start, stop, direction, prices)
                works = [replace(work, elements=0) for work in works]
            costs = [
                price.of(Work(self.batch * work.macs, self.batch * work.elements, work.syncs))
                for price, work in zip(prices, works, strict=True)
            ]
            self._known[key] = self.batch * sent + (max(costs) if self.worst else sum(costs) / len(costs))
        return self._known[key]

    @property
    def _layers(self) -> Sequence[Layer]:
        return self.tiling.layers.layers

    def _from_gateway(self, start: int, stop: int, direction: Direction, prices: Sequence[Prices]) -> float:
        """Cost of what the gateway sends the tiles of others for the first group of a pass, halos and all."""
        assert self.owners is not None
        layers, tiles, cost = self.tiling.layers, Counter(self.owners), 0.0
        made, sent = (stop, start) if direction == "forward" else (start, stop)
        for tile, owner, price in zip(self.tiling.tiles, self.owners, prices, strict=True):
            core = self.tiling.core(made, tile)
            regions = (
                layers.needed(start, stop, {stop: core})
                if direction == "forward"
                else layers.reached(start, stop, core)
            )
            if owner != GATEWAY and sent in regions:  # a price counts the tiles that its process has
                cost += layers.maps[sent].channels * regions[sent].area * price.element / tiles[owner]
        return cost

    def total(self, profile: Profile, direction: Direction) -> float:
        """Cost of a profile (equation 5.1)."""
        return sum(self.group(start, stop, direction) for start, stop in profile.groups)

    def cheapest(self, direction: Direction, cuts: Sequence[int] | None = None) -> Profile:
        """The profile of least cost (section 5.2), over all cuts or some."""
        return cheapest(cuts or self.tiling.layers.cuts, lambda start, stop: self.group(start, stop, direction))


def cheapest(
    cuts: Sequence[int],
    cost: Callable[[int, int], float],
    size: Callable[[int, int], float] | None = None,
    headroom: float = float("inf"),
) -> Profile:
    """The shortest path over cuts, group by group (Algorithm 2), within a bound on another sum.

    The graph has no cycles, so that one pass over its vertices finds what Dijkstra's algorithm finds. Where sizes are
    bounded every vertex has all ways to it that no other beats in both cost and size.

    Args:
        cuts: vertices in order.
        cost: of the group between two cuts.
        size: of the same, such as bytes kept; nothing by default.
        headroom: what sizes may sum up to.

    Returns:
        The cheapest profile; of equals the one with the fewest groups.

    Raises:
        ValueError: no profile fits; its message names the smallest sum that would fit.
    """
    ways: dict[int, list[_Path]] = {cuts[0]: [(0.0, 0.0, 0, (cuts[0],))]}
    for index, stop in enumerate(cuts[1:], 1):
        found = []
        for start in cuts[:index]:
            price, bulk = cost(start, stop), size(start, stop) if size else 0.0
            found += [(spent + price, held + bulk, n + 1, (*path, stop)) for spent, held, n, path in ways[start]]
        ways[stop] = _pareto(found)
    fitting = [way for way in ways[cuts[-1]] if way[1] <= headroom]
    if not fitting:
        raise ValueError(f"no grouping fits; the smallest needs {min(way[1] for way in ways[cuts[-1]]):g}.")
    return Profile(min(fitting)[-1])


_Path = tuple[float, float, int, tuple[int, ...]]
"""Cost, size, groups and cuts."""


def _pareto(ways: list[_Path]) -> list[_Path]:
    """Those that no other one beats or equals in both cost and size; of equals the one with the fewest groups."""
    kept: list[_Path] = []
    for way in sorted(ways):
        if not kept or way[1] < kept[-1][1]:
            kept.append(way)
    return kept
