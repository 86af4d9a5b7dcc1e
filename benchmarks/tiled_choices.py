"""What the tiled benchmarks compare: grouping profiles over a link, and ways to run tile after tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.netns import _bits
from benchmarks.tiled_rank import network
from snugfit.tiling.geometry import balanced
from snugfit.tiling.grouping import CostModel, Prices
from snugfit.tiling.layers import Tiling
from snugfit.tiling.profile import Profile, one_group
from snugfit.tiling.stem import stem_of
from snugfit.tiling.ways import FLOAT, meeting_points, thinned, ways_on_one_device

MACS_PER_SECOND = 30e9
"""Of one thread here, about."""
SYNC_SECONDS = 1e-3
GRIDS = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6))
LEAN, LEAN_GRIDS = "0-8 | 8-28 | 28-44", ((2, 3), (3, 2), (3, 3), (2, 4), (3, 4), (4, 4))
"""Groups that meet behind the second and the fourth pool, and grids to try them with."""


@dataclass(frozen=True)
class LinkWay:
    """Grouping profiles, and the seconds that the cost model predicts of both directions, but for what all share."""

    forward: str
    backward: str
    predicted_forward: float
    predicted_backward: float


def ways_over_a_link(size: int, batch: int, rate: str) -> dict[str, LinkWay]:
    """One group, a group per layer, and the cheapest groups for two tiles side by side."""
    layers = stem_of(network(size, frozen=True), (3, size, size)).layers
    last = layers.maps[-1]
    tiling = Tiling.of(layers, balanced(last.height, 1), balanced(last.width, 2))
    prices = Prices(1 / MACS_PER_SECOND, FLOAT * 8 / _bits(rate), SYNC_SECONDS)
    model, cuts = CostModel(tiling, (prices,), batch), meeting_points(layers)
    profiles = {
        "one group": (one_group(cuts), one_group(cuts)),
        "a group per layer": (Profile(cuts), Profile(cuts)),
        "chosen": (model.cheapest("forward", cuts), model.cheapest("backward", cuts)),
    }
    return {
        name: LinkWay(str(forward), str(backward), model.total(forward, "forward"), model.total(backward, "backward"))
        for name, (forward, backward) in profiles.items()
    }


def sequential_ways(size: int, *, frozen: bool) -> list[dict[str, Any]]:
    """Grids and groups to run tile after tile, from the fastest to the leanest."""
    layers = stem_of(network(size, frozen=frozen), (3, size, size)).layers
    ways = thinned(ways_on_one_device(layers, GRIDS))
    lean = [{"grid": grid, "forward": LEAN} for grid in LEAN_GRIDS]
    return [*lean, *({"grid": way.grid, "forward": str(way.profile)} for way in ways)]
