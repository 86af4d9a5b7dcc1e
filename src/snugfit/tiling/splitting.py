"""The first layer of a group in parts: the part without a halo while that is on its way, then the strips around it.

Exactly the same pixels are computed. This costs a copy of the output and some small calls, and hides the time of an
exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from snugfit.tiling.exchange import Cell
from snugfit.tiling.geometry import Interval
from snugfit.tiling.layers import Layer, MapSize, Region
from snugfit.tiling.schedule import Schedule
from snugfit.tiling.step_cost import FLOAT, Prediction

COPIED_BYTES_PER_SECOND, CALL_SECONDS = 4e9, 1e-4
"""Speed of assembling the output from its parts, and time of a call for a strip; roughly those of one thread."""


@dataclass(frozen=True)
class Split:
    """A part of a layer's output, in regions that cover it once.

    Attributes:
        inner: computed from the tile's own pixels; it may be empty.
        strips: around it; up to four.
    """

    inner: Region
    strips: tuple[Region, ...]

    @classmethod
    def of(cls, layer: Layer, made: Region, core: Region, size: MapSize) -> Split:
        """Split the part that a layer makes on a tile, of which ``core`` is the tile's own part of what it reads."""
        inner = Region(
            made.rows & layer.rows.inside(core.rows, size.height),
            made.columns & layer.columns.inside(core.columns, size.width),
        )
        if not inner.area:
            return cls(inner, (made,))
        above, below = Interval(made.rows.start, inner.rows.start), Interval(inner.rows.stop, made.rows.stop)
        before = Interval(made.columns.start, inner.columns.start)
        behind = Interval(inner.columns.stop, made.columns.stop)
        strips = [Region(rows, made.columns) for rows in (above, below)]
        strips += [Region(inner.rows, columns) for columns in (before, behind)]
        return cls(inner, tuple(strip for strip in strips if strip.area))


def can_split(schedule: Schedule, index: int) -> bool:
    """Whether a forward group begins with a convolution or pool that reads a halo; not with a norm that needs sums."""
    start = schedule.forward.groups[index][0]
    first = schedule.tiling.layers.layers[start]
    return index > 0 and first.reads == (start,) and not first.sums


def groups_to_split(schedule: Schedule, cells: Sequence[Cell], prediction: Prediction, images: int) -> frozenset[int]:
    """The forward groups in which hiding the exchange saves more than it costs.

    The hidden time is the shorter of the exchange and the slowest tile's computation of the first layer without its
    halo.

    Args:
        schedule: what every tile does.
        cells: tiles of all processes.
        prediction: duration of the step.
        images: of a tile.
    """
    spans = [each for each in prediction.spans if each.stage.kind in ("images", "forward halo")]
    return frozenset(
        index
        for index, span in enumerate(spans)
        if can_split(schedule, index)
        and any(min(span.sending, work) > cost for work, cost in _works(schedule, cells, prediction, images, index))
    )


def _works(
    schedule: Schedule, cells: Sequence[Cell], prediction: Prediction, images: int, index: int
) -> list[tuple[float, float]]:
    """For every cell, seconds of computing the part that needs no halo, and seconds that splitting adds."""
    layers, start = schedule.tiling.layers, schedule.forward.groups[index][0]
    layer, made, found = layers.layers[start], layers.maps[start + 1], list[tuple[float, float]]()
    for cell in cells:
        region = schedule.forward_groups[cell.tile][index].get(start + 1)
        if region is None or not region.area:
            continue
        parts = Split.of(layer, region, schedule.tiling.core(start, cell.tile), layers.maps[start])
        seconds = images * parts.inner.area * layer.macs / prediction.cluster.ranks[cell.rank].macs_per_second
        copied = FLOAT * images * made.channels * region.area / COPIED_BYTES_PER_SECOND
        found.append((seconds, copied + CALL_SECONDS * len(parts.strips)))
    return found
