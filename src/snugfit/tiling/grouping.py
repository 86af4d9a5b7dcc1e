"""Costs of grouping profiles, and the cheapest one: sections 5.1 and 5.2 of Rama and Gerstlauer (UT-CERC-24-02).

Forward, the tile of a group's last feature map needs a halo of its first one. Backward, the tile of the first gradient
needs a halo of the last one. Computation counts the region that a layer produces. Each
direction has its own profile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from snugfit.tiling.layers import Layer, Layers, Region, Tiling
from snugfit.tiling.profile import Profile
from snugfit.tiling.step_cost import GATEWAY

Direction = Literal["forward", "backward"]


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
    if direction == "forward":
        regions, exchanged = layers.needed(start, stop, {stop: core}, clip=clip), start
    else:
        regions, exchanged = layers.reached(start, stop, core, clip=clip), stop
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
    """Costs of groups for the tiles of a network.

    Attributes:
        tiling: the network and its tiles.
        prices: of the device that runs each tile, in the order of ``tiling.tiles``; or one for all.
        batch: images.
        worst: whether a group takes as long as its slowest tile, since all wait at its end; otherwise the mean of
            tiles.
        owners: the rank that runs each tile. With owners, the gateway, rank 0, sends the parts of the first feature map
            and of the last one's gradient one after another over its own link. Without, these are already there, and
            only halos are sent, as in section 5.1.
    """

    tiling: Tiling
    prices: Sequence[Prices]
    batch: int = 1
    worst: bool = True
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
        """Cost of what the gateway sends to other processes' tiles for the first group of a pass, including halos."""
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
    """The shortest path over cuts, group by group (Algorithm 2), with an upper bound on a second sum.

    The graph has no cycles, so one pass over its vertices finds what Dijkstra's algorithm finds. With a bound, every
    vertex keeps all paths that no other one beats in both cost and size.

    Args:
        cuts: vertices in order.
        cost: of the group between two cuts.
        size: of the same group, such as kept bytes; zero by default.
        headroom: upper bound on the sum of sizes.

    Returns:
        The cheapest profile; among equals the one with the fewest groups.

    Raises:
        ValueError: no profile fits; the message contains the smallest sum that would fit.
    """
    paths: dict[int, list[_Path]] = {cuts[0]: [(0.0, 0.0, 0, (cuts[0],))]}
    for index, stop in enumerate(cuts[1:], 1):
        found = []
        for start in cuts[:index]:
            price, bulk = cost(start, stop), size(start, stop) if size else 0.0
            found += [(spent + price, held + bulk, n + 1, (*path, stop)) for spent, held, n, path in paths[start]]
        paths[stop] = _pareto(found)
    fitting = [candidate for candidate in paths[cuts[-1]] if candidate[1] <= headroom]
    if not fitting:
        raise ValueError(
            f"no grouping fits; the smallest needs {min(candidate[1] for candidate in paths[cuts[-1]]):g}."
        )
    return Profile(min(fitting)[-1])


_Path = tuple[float, float, int, tuple[int, ...]]
"""Cost, size, groups and cuts."""


def _pareto(paths: list[_Path]) -> list[_Path]:
    """The paths that no other one beats or equals in both cost and size.

    Among equals the one with the fewest groups.
    """
    kept: list[_Path] = []
    for candidate in sorted(paths):
        if not kept or candidate[1] < kept[-1][1]:
            kept.append(candidate)
    return kept
