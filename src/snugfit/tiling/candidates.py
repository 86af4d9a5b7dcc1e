"""Candidate grids and groups with their bytes and multiply-accumulates; from regions alone.

On one device whole feature maps are kept between groups, and the activations of one tile in one group are alive at a
time. Over several devices, each holds its own tile of everything (sections 5.1 and 6.2 of Rama and Gerstlauer,
UT-CERC-24-02).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from snugfit.tiling.geometry import SAME
from snugfit.tiling.grouping import Direction, Profile, cheapest
from snugfit.tiling.layers import Layers, Tiling, tiling_of
from snugfit.tiling.step_cost import FLOAT


@dataclass(frozen=True)
class Candidate:
    """A grid and groups on one device.

    Attributes:
        bytes: per image: kept feature maps, plus the most that a tile of any group adds.
        work: multiply-accumulates of a step, divided by those of an untiled step.
    """

    grid: tuple[int, int]
    profile: Profile
    bytes: int
    work: float


def group_boundaries(layers: Layers, direction: Direction = "forward", *, apart: bool = False) -> tuple[int, ...]:
    """Cuts at which it can pay to end a group; an exchange anywhere else saves nothing.

    They lie in front of convolutions and pools. They also lie at norms that normalise by their batch, which wait for
    sums anyway: in front of them forward, behind them backward. ``apart`` also cuts behind convolutions and pools.
    Backward, norms then run without a halo, and less is kept and sent, but their sums do not travel with halos.
    """
    found = {0, len(layers.layers)}
    for number, each in enumerate(layers.layers):
        if each.macs or (each.rows, each.columns) != (SAME, SAME):
            found |= {number, number + 1} if apart else {number}
        if each.sums:
            found.add(number if direction == "forward" else number + 1)
    return tuple(cut for cut in layers.cuts if cut in found)


def most_square_grid(tiles: int, height: int, width: int) -> tuple[int, int]:
    """The grid whose tiles of the last feature map are closest to squares; of fewer tiles if that many do not fit."""
    for count in range(tiles, 0, -1):
        grids = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
        fitting = [grid for grid in grids if grid[0] <= height and grid[1] <= width]
        if fitting:
            return min(fitting, key=lambda grid: (abs(height / grid[0] - width / grid[1]), grid[0]))
    return 1, 1


def candidates_on_one_device(layers: Layers, grids: Iterable[tuple[int, int]]) -> list[Candidate]:
    """All candidates that no other one beats in both bytes and work, the least work first."""
    found = [candidate for grid in grids for candidate in _candidates_of_grid(layers, grid)]
    found.sort(key=lambda candidate: (candidate.work, candidate.bytes))
    unbeaten: list[Candidate] = []
    for candidate in found:
        if not unbeaten or candidate.bytes < unbeaten[-1].bytes:
            unbeaten.append(candidate)
    return unbeaten


def scratch_bytes(layers: Layers, profile: Profile) -> int:
    """Most bytes per image that feature maps and their gradients take in scratch files, on one device in a step.

    Storage is reused for feature maps of the same size only, as in :class:`snugfit.memory.scratch.MappedScratch`.
    Feature maps of the forward pass stay until the backward pass has read them. The first and the last one are in
    memory. Norms that normalise by their batch begin a group too.
    """
    cuts = sorted({*profile.cuts, *(number for number, each in enumerate(layers.layers) if each.sums)})
    spans = list(pairwise(cuts))
    reads = [[each for each in layers.entries(*span) if each] for span in spans]
    makes = [[each for each in layers.outputs(*span) if each < len(layers.layers)] for span in spans]
    alive, most = Counter[int](), Counter[int]()

    def count(numbers: Iterable[int], change: int) -> None:
        for number in numbers:
            alive[layers.maps[number].elements] += change
        for size in alive:
            most[size] = max(most[size], alive[size])

    count([number for made in makes for number in made], 1)
    known: set[int] = set()
    for place in range(len(spans) - 1, -1, -1):
        count(set(reads[place]) - known, 1)
        known |= set(reads[place])
        count(set(makes[place]) & known, -1)
        earlier = {number for before in reads[:place] for number in before}
        count(set(reads[place]) - earlier, -1)
    return FLOAT * sum(size * number for size, number in most.items())


def subsample(candidates: Sequence[Candidate], step: float = 0.93, most: int = 7) -> list[Candidate]:
    """Keep candidates of at most ``step`` times the bytes of the one before, at most ``most``, and the leanest."""
    kept: list[Candidate] = []
    for candidate in candidates:
        if not kept or candidate.bytes <= step * kept[-1].bytes:
            kept.append(candidate)
    if candidates and kept[-1] != candidates[-1]:
        kept.append(candidates[-1])
    return [*kept[: most - 1], kept[-1]] if len(kept) > most else kept


def _candidates_of_grid(layers: Layers, grid: tuple[int, int]) -> list[Candidate]:
    last = layers.maps[-1]
    if grid[0] > last.height or grid[1] > last.width:
        return []
    tiling = tiling_of(layers, grid)
    cuts = group_boundaries(layers)
    groups = {(start, stop): _Group.of(tiling, start, stop) for i, start in enumerate(cuts) for stop in cuts[i + 1 :]}
    areas = [size.height * size.width for size in layers.maps[1:]]
    plain = sum(each.macs * area for each, area in zip(layers.layers, areas, strict=True))
    found = []
    for limit in sorted({group.held for group in groups.values()}):
        profile = _cheapest_within(cuts, groups, limit)
        if profile is None:
            continue
        kept = sum(layers.maps[cut].elements for cut in profile.cuts[1:])
        most = max(groups[each].peak for each in profile.groups)
        work = sum(groups[each].macs for each in profile.groups)
        found.append(Candidate(grid, profile, FLOAT * (kept + most), (4 * work) / (3 * plain) if plain else 4 / 3))
    return found


def _cheapest_within(cuts: Sequence[int], groups: dict[tuple[int, int], _Group], limit: int) -> Profile | None:
    """The profile with the fewest kept values, then least work, whose groups hold at most ``limit`` values per tile."""
    held = {each for each, group in groups.items() if group.held <= limit}
    if not all(any((start, stop) in held for stop in cuts) for start in cuts[:-1]):
        return None
    profile = cheapest(cuts, lambda start, stop: groups[start, stop].kept if (start, stop) in held else float("inf"))
    return profile if all(each in held for each in profile.groups) else None


@dataclass(frozen=True)
class _Group:
    """Values of a tile in the middle of the grid, per image, and approximate multiply-accumulates of all tiles.

    Held are all feature maps within the group; kept is the whole last one; the peak adds the whole first and last.
    """

    held: int
    peak: int
    kept: int
    macs: int

    @classmethod
    def of(cls, tiling: Tiling, start: int, stop: int) -> _Group:
        layers, (down, across) = tiling.layers, tiling.grid
        tile = (down // 2, across // 2)
        regions = layers.needed(start, stop, {stop: tiling.core(stop, tile)})
        held = sum(layers.maps[number].channels * region.area for number, region in regions.items())
        macs = sum(regions[number + 1].area * layers.layers[number].macs for number in range(start, stop))
        around = layers.maps[start].elements + layers.maps[stop].elements
        return cls(held, held + around, layers.maps[stop].elements, macs * down * across)
