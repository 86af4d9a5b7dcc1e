"""Geometry of a convolutional network: feature maps, and layers that read regions of them; no weights, no torch.

Map 0 is the image; layer ``i`` makes map ``i + 1``. A **cut** is a feature map at which no other one crosses: a group
of layers may begin or end there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from snugfit.errors import ModelError
from snugfit.tiling.geometry import EMPTY, SAME, Interval, Window, scaled_up, weighted


@dataclass(frozen=True)
class Region:
    """A rectangle of a feature map: rows and columns."""

    rows: Interval
    columns: Interval

    @property
    def area(self) -> int:
        """Number of pixels."""
        return len(self.rows) * len(self.columns)

    def hull(self, other: Region) -> Region:
        """The smallest rectangle that holds both."""
        if not self.area or not other.area:
            return self if self.area else other
        return Region(self.rows.hull(other.rows), self.columns.hull(other.columns))

    def __and__(self, other: Region) -> Region:
        """The intersection."""
        return Region(self.rows & other.rows, self.columns & other.columns)

    def __contains__(self, other: object) -> bool:
        """Whether another rectangle lies within this one; an empty one always does."""
        if not isinstance(other, Region):
            return False
        return not other.area or (other.rows in self.rows and other.columns in self.columns)


EMPTY_REGION = Region(EMPTY, EMPTY)


@dataclass(frozen=True)
class MapSize:
    """Channels, height and width of a feature map of one image."""

    channels: int
    height: int
    width: int

    @cached_property
    def whole(self) -> Region:
        """The region of the whole feature map."""
        return Region(Interval.whole(self.height), Interval.whole(self.width))

    @property
    def elements(self) -> int:
        """Number of values."""
        return self.channels * self.height * self.width


@dataclass(frozen=True)
class Layer:
    """One operator on feature maps.

    Attributes:
        name: for messages.
        reads: numbers of the feature maps that it reads, by rows and columns; more than one for additions.
        macs: multiply-accumulates per output pixel; 0 for all but convolutions.
        weights: number of parameters.
        sums: channels whose sums over the whole feature map it needs, as BatchNorm on batch statistics does.
    """

    name: str
    reads: tuple[int, ...]
    rows: Window = SAME
    columns: Window = SAME
    macs: int = 0
    weights: int = 0
    sums: int = 0

    @property
    def strides(self) -> int:
        """Input pixels per output pixel."""
        return self.rows.stride * self.columns.stride

    def needs(self, output: Region) -> Region:
        """The input region that a part of its output needs; not clipped."""
        return Region(self.rows.needs(output.rows), self.columns.needs(output.columns))

    def reaches(self, read: Region) -> Region:
        """The output region that a part of its input has an effect on; not clipped."""
        return Region(self.rows.reaches(read.rows), self.columns.reaches(read.columns))


@dataclass(frozen=True)
class Layers:
    """A network of layers in order of execution.

    Attributes:
        maps: sizes of the feature maps, the image's first.
        layers: layer ``i`` makes map ``i + 1``.
    """

    maps: tuple[MapSize, ...]
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        for number, layer in enumerate(self.layers):
            made = self.maps[number + 1]
            for read in layer.reads:
                size = self.maps[read]
                found = (layer.rows.outputs(size.height), layer.columns.outputs(size.width))
                if read > number or found != (made.height, made.width):
                    raise ModelError(
                        f"layer {layer.name} cannot make a feature map of {made.height}x{made.width} of one of "
                        f"{size.height}x{size.width}."
                    )

    @classmethod
    def of(cls, image: MapSize, layers: Iterable[tuple[Layer, int]]) -> Layers:
        """Layers with the channels that each makes; sizes of feature maps are derived.

        Raises:
            ModelError: a feature map would be empty, or feature maps of different sizes are added.
        """
        maps, made = [image], []
        for layer, channels in layers:
            size = maps[layer.reads[0]]
            found = MapSize(channels, layer.rows.outputs(size.height), layer.columns.outputs(size.width))
            if not found.elements:
                raise ModelError(f"feature maps of {size.height}x{size.width} are too small for layer {layer.name}.")
            maps.append(found)
            made.append(layer)
        return cls(tuple(maps), tuple(made))

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Numbers of the feature maps at which no other one crosses, including the image and the last one."""
        reach = [0] * len(self.maps)  # the last map that is made of each
        for number, layer in enumerate(self.layers):
            for read in layer.reads:
                reach[read] = number + 1
        crossing, found = 0, [0]
        for number in range(1, len(self.maps)):
            crossing = max(crossing, reach[number - 1])
            if crossing <= number:
                found.append(number)
        return tuple(found)

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """Number of layers that read each feature map; a layer that reads it twice counts twice."""
        found = [0] * len(self.maps)
        for layer in self.layers:
            for read in layer.reads:
                found[read] += 1
        return tuple(found)

    def alive(self, number: int) -> tuple[int, ...]:
        """The feature maps up to this one that later layers read; at a cut there is exactly one."""
        return self._alive[number]

    @cached_property
    def _alive(self) -> tuple[tuple[int, ...], ...]:
        reads = [{read for layer in self.layers[number:] for read in layer.reads} for number in range(len(self.layers))]
        found = [tuple(sorted(each for each in read if each <= number)) for number, read in enumerate(reads)]
        return (*found, (len(self.layers),))

    def entries(self, start: int, stop: int) -> list[int]:
        """The earlier feature maps that layers ``start``, ..., ``stop - 1`` read."""
        reads = {read for layer in self.layers[start:stop] for read in layer.reads}
        return sorted(number for number in reads if number <= start)

    def outputs(self, start: int, stop: int) -> list[int]:
        """The feature maps that layers ``start``, ..., ``stop - 1`` make for later layers."""
        return [number for number in self.alive(stop) if number > start]

    def needed(self, start: int, stop: int, outputs: Mapping[int, Region], *, clip: bool = True) -> dict[int, Region]:
        """The region of each feature map that outputs of layers ``start``, ..., ``stop - 1`` need (equations 4.1, 4.2).

        Args:
            start, stop: numbers of feature maps; usually cuts.
            outputs: regions of feature maps up to ``stop``, by number.
            clip: whether to leave out what lies outside a feature map, where nothing is fetched or computed.
        """
        found = {number: self._clipped(number, region, clip=clip) for number, region in outputs.items()}
        for number in range(stop - 1, start - 1, -1):
            layer = self.layers[number]
            if number + 1 not in found:
                continue
            for read in layer.reads:
                needs = self._clipped(read, layer.needs(found[number + 1]), clip=clip)
                found[read] = found[read].hull(needs) if read in found else needs
        return found

    def reached(self, start: int, stop: int, read: Region, *, clip: bool = True) -> dict[int, Region]:
        """The region of each feature map whose gradient a part of map ``start`` needs (equations 4.3 and 4.4).

        Args:
            start, stop: cuts.
            read: a region of map ``start``.
            clip: whether to leave out what lies outside a feature map.
        """
        found = {start: self._clipped(start, read, clip=clip)}
        for number in range(start, stop):
            layer, parts = self.layers[number], [found[each] for each in self.layers[number].reads if each in found]
            for part in parts:
                reaches = self._clipped(number + 1, layer.reaches(part), clip=clip)
                before = found.get(number + 1)
                found[number + 1] = reaches if before is None else before.hull(reaches)
        return found

    def _clipped(self, number: int, region: Region, *, clip: bool) -> Region:
        return region & self.maps[number].whole if clip else region


@dataclass(frozen=True)
class Tiling:
    """Tiles of all feature maps: their cores, the intervals of rows and columns, cover each feature map once."""

    layers: Layers
    rows: tuple[tuple[Interval, ...], ...]
    columns: tuple[tuple[Interval, ...], ...]

    @classmethod
    def of(cls, layers: Layers, rows: Sequence[Interval], columns: Sequence[Interval]) -> Tiling:
        """Tiles from intervals of the last feature map; earlier cuts are multiplied by the strides."""
        down, across = {len(layers.layers): tuple(rows)}, {len(layers.layers): tuple(columns)}
        for number in range(len(layers.layers) - 1, -1, -1):
            layer = layers.layers[number]
            for read in layer.reads:
                size = layers.maps[read]
                down[read] = scaled_up(down[number + 1], layer.rows, size.height)
                across[read] = scaled_up(across[number + 1], layer.columns, size.width)
        numbers = range(len(layers.maps))
        return cls(layers, tuple(down[number] for number in numbers), tuple(across[number] for number in numbers))

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles down and across."""
        return len(self.rows[0]), len(self.columns[0])

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Row and column of every tile, row by row."""
        down, across = self.grid
        return [(row, column) for row in range(down) for column in range(across)]

    def core(self, number: int, tile: tuple[int, int]) -> Region:
        """The part of a feature map that belongs to a tile."""
        return Region(self.rows[number][tile[0]], self.columns[number][tile[1]])


def require_grid(grid: tuple[int, int], size: MapSize) -> None:
    """Check that no tile of the last feature map is empty.

    Raises:
        ModelError: the feature map has fewer rows or columns than the grid.
    """
    if min(grid) < 1 or grid[0] > size.height or grid[1] > size.width:
        shape = f"{size.height}x{size.width}"
        raise ModelError(f"a feature map of {shape} cannot be cut into {grid[0]}x{grid[1]} tiles: use a smaller grid.")


Shares = tuple[tuple[float, ...], tuple[float, ...]]
"""Weights of a grid's rows and of its columns."""


def tiling_of(layers: Layers, grid: tuple[int, int], shares: Shares | None = None) -> Tiling:
    """Tiles of a grid (down and across), equal or in proportion to weights."""
    last, (rows, columns) = layers.maps[-1], shares or ((1.0,) * grid[0], (1.0,) * grid[1])
    return Tiling.of(layers, weighted(last.height, rows), weighted(last.width, columns))


def shares_by_speed(grid: tuple[int, int], speeds: Sequence[float]) -> Shares:
    """Weights of a grid's rows and columns that bring tiles closest to the speeds of their devices, row by row.

    A device alone in its row and column gets exactly its share.
    """
    down, across = grid
    rows = tuple(sum(speeds[row * across : (row + 1) * across]) for row in range(down))
    columns = tuple(sum(speeds[column::across]) for column in range(across))
    return rows, columns
