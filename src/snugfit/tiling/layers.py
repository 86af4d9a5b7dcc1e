"""A convolutional network as tiling sees it: maps, and layers that read stretches of them; no weights, no torch.

Map 0 is the image; layer ``i`` makes map ``i + 1``. A **cut** is a map at which nothing else crosses: where a group of
layers may begin or end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from snugfit.errors import ModelError
from snugfit.tiling.geometry import SAME, Interval, Window, scaled_up


@dataclass(frozen=True)
class Region:
    """A rectangle of a map: rows and columns."""

    rows: Interval
    columns: Interval

    @property
    def area(self) -> int:
        """Pixels."""
        return len(self.rows) * len(self.columns)

    def hull(self, other: Region) -> Region:
        """The smallest rectangle that holds both."""
        if not self.area or not other.area:
            return self if self.area else other
        return Region(self.rows.hull(other.rows), self.columns.hull(other.columns))

    def __and__(self, other: Region) -> Region:
        """What lies in both."""
        return Region(self.rows & other.rows, self.columns & other.columns)

    def __contains__(self, other: object) -> bool:
        """Whether another rectangle lies within this one; an empty one always does."""
        if not isinstance(other, Region):
            return False
        return not other.area or (other.rows in self.rows and other.columns in self.columns)


@dataclass(frozen=True)
class MapSize:
    """Channels, height and width of a map of one image."""

    channels: int
    height: int
    width: int

    @property
    def whole(self) -> Region:
        """All of it."""
        return Region(Interval.whole(self.height), Interval.whole(self.width))

    @property
    def elements(self) -> int:
        """Values."""
        return self.channels * self.height * self.width


@dataclass(frozen=True)
class Layer:
    """One operator on maps.

    Attributes:
        name: for messages.
        reads: numbers of the maps that it reads; more than one where maps are added.
        rows, columns: how it reads them.
        macs: multiply-accumulates per pixel that it makes; 0 for all but convolutions.
        weights: its parameters.
        sums: channels of which it needs sums over the whole map, as BatchNorm does on batch statistics.
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
        """Pixels that it reads per pixel that it makes."""
        return self.rows.stride * self.columns.stride

    def needs(self, output: Region) -> Region:
        """What of the maps that it reads a part of its output needs; not clipped."""
        return Region(self.rows.needs(output.rows), self.columns.needs(output.columns))

    def reaches(self, read: Region) -> Region:
        """What of its output a part of the maps that it reads has an effect on; not clipped."""
        return Region(self.rows.reaches(read.rows), self.columns.reaches(read.columns))


@dataclass(frozen=True)
class Layers:
    """A network of layers in order of execution.

    Attributes:
        maps: their sizes, the image's first.
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
                        f"layer {layer.name} cannot make a map of {made.height}x{made.width} of one of "
                        f"{size.height}x{size.width}."
                    )

    @classmethod
    def of(cls, image: MapSize, layers: Iterable[tuple[Layer, int]]) -> Layers:
        """Layers with the channels that each makes; sizes of maps follow.

        Raises:
            ModelError: a map would be empty, or maps of different sizes are to be added.
        """
        maps, made = [image], []
        for layer, channels in layers:
            size = maps[layer.reads[0]]
            found = MapSize(channels, layer.rows.outputs(size.height), layer.columns.outputs(size.width))
            if not found.elements:
                raise ModelError(f"maps of {size.height}x{size.width} are too small for layer {layer.name}.")
            maps.append(found)
            made.append(layer)
        return cls(tuple(maps), tuple(made))

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Numbers of the maps at which nothing else crosses, the image and the last map among them."""
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

    def needed(self, start: int, stop: int, output: Region, *, clip: bool = True) -> dict[int, Region]:
        """What of each map, from ``start`` to ``stop``, a part of map ``stop`` needs (equations 4.1 and 4.2).

        Args:
            start, stop: cuts.
            output: a part of map ``stop``.
            clip: whether to leave out what lies outside a map, where nothing has to be fetched or computed.
        """
        found = {stop: self._clipped(stop, output, clip=clip)}
        for number in range(stop - 1, start - 1, -1):
            layer = self.layers[number]
            if number + 1 not in found:
                continue
            for read in layer.reads:
                needs = self._clipped(read, layer.needs(found[number + 1]), clip=clip)
                found[read] = found[read].hull(needs) if read in found else needs
        return found

    def reached(self, start: int, stop: int, read: Region, *, clip: bool = True) -> dict[int, Region]:
        """What of each map has a gradient that a part of map ``start`` needs (equations 4.3 and 4.4).

        Args:
            start, stop: cuts.
            read: a part of map ``start``.
            clip: whether to leave out what lies outside a map.
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
    """Tiles of all cuts: their cores, which cover each map once.

    Attributes:
        layers: the network.
        rows, columns: for every cut, its rows and columns cut into parts.
    """

    layers: Layers
    rows: dict[int, tuple[Interval, ...]]
    columns: dict[int, tuple[Interval, ...]]

    @classmethod
    def of(cls, layers: Layers, rows: Sequence[Interval], columns: Sequence[Interval]) -> Tiling:
        """Tiles from the parts of the last map's rows and columns; cuts of maps before move by the strides."""
        last = layers.cuts[-1]
        found = {last: (tuple(rows), tuple(columns))}
        for start, stop in reversed(list(pairwise(layers.cuts))):
            path, size, (down, across) = _path(layers, start, stop), layers.maps[start], found[stop]
            found[start] = (
                scaled_up(down, _strides(layer.rows for layer in path), size.height),
                scaled_up(across, _strides(layer.columns for layer in path), size.width),
            )
        return cls(layers, {cut: each[0] for cut, each in found.items()}, {cut: each[1] for cut, each in found.items()})

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles down and across."""
        return len(self.rows[0]), len(self.columns[0])

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Row and column of every tile, row by row."""
        down, across = self.grid
        return [(row, column) for row in range(down) for column in range(across)]

    def core(self, cut: int, tile: tuple[int, int]) -> Region:
        """What of a map belongs to a tile."""
        return Region(self.rows[cut][tile[0]], self.columns[cut][tile[1]])


def _path(layers: Layers, start: int, stop: int) -> list[Layer]:
    """Layers from one cut back to another, along the first map that each reads."""
    path, number = [], stop
    while number > start:
        layer = layers.layers[number - 1]
        path.append(layer)
        number = layer.reads[0]
    return path


def _strides(windows: Iterable[Window]) -> Window:
    return Window(stride=prod(window.stride for window in windows))
