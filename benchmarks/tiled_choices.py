"""What the tiled benchmarks compare: grouping profiles over a link, and ways to run tile after tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.netns import _bits
from benchmarks.tiled_rank import network
from snugfit._core.hardware import Link, Rank, uniform_cluster
from snugfit.tiling.candidates import candidates_on_one_device, group_boundaries, subsample
from snugfit.tiling.cost_counter import count_step_cost
from snugfit.tiling.exchange import cells_of
from snugfit.tiling.geometry import balanced
from snugfit.tiling.grouping import CostModel, Profile, one_group, prices_of
from snugfit.tiling.layers import Tiling
from snugfit.tiling.plan import schedule_of
from snugfit.tiling.step_cost import Pass, Prediction
from snugfit.tiling.tileable_prefix import find_tileable_prefix

MACS_PER_SECOND = 30e9
"""Of one thread here, about."""
SYNC_SECONDS = 1e-3
GRIDS = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6))
SCRATCH_GRIDS = ((2, 2), (3, 3), (4, 4))
LEAN, LEAN_GRIDS = "0-8 | 8-28 | 28-44", ((2, 3), (3, 2), (3, 3), (2, 4), (3, 4), (4, 4))
"""Groups that meet behind the second and the fourth pool, and grids to try them with."""


@dataclass(frozen=True)
class LinkWay:
    """Grouping profiles, and the seconds predicted of both directions, with what the gateway sends and gets."""

    forward: str
    backward: str
    predicted_forward: float
    predicted_backward: float


def ways_over_a_link(size: int, batch: int, rate: str) -> dict[str, LinkWay]:
    """One group, a group per layer, and the cheapest groups for two tiles side by side."""
    prefix = find_tileable_prefix(network(size, frozen=True), (3, size, size))
    layers, last = prefix.layers, prefix.layers.maps[-1]
    tiling = Tiling.of(layers, balanced(last.height, 1), balanced(last.width, 2))
    cluster = uniform_cluster(2, Rank(0, "host", 1, MACS_PER_SECOND, 0), Link(0, 1, _bits(rate) / 8, SYNC_SECONDS))
    model, cuts = CostModel(tiling, prices_of(cluster, (0, 1)), batch, owners=(0, 1)), group_boundaries(layers)
    profiles = {
        "one group": (one_group(cuts), one_group(cuts)),
        "a group per layer": (Profile(cuts), Profile(cuts)),
        "chosen": (model.cheapest("forward", cuts), model.cheapest("backward", cuts)),
    }

    def seconds(forward: Profile, backward: Profile | None, part: Pass) -> float:
        schedule = schedule_of(prefix, tiling, forward, backward)
        return Prediction(count_step_cost(schedule, cells_of(tiling.tiles, 1, 2), batch, weights=0), cluster).part(part)

    return {
        name: LinkWay(
            str(forward), str(backward), seconds(forward, None, "forward"), seconds(backward, backward, "backward")
        )
        for name, (forward, backward) in profiles.items()
    }  # fmt: skip


def sequential_ways(size: int, *, frozen: bool) -> list[dict[str, Any]]:
    """Grids and groups to run tile after tile, from the fastest to the leanest."""
    layers = find_tileable_prefix(network(size, frozen=frozen), (3, size, size)).layers
    ways = subsample(candidates_on_one_device(layers, GRIDS))
    lean = [{"grid": grid, "forward": LEAN} for grid in LEAN_GRIDS]
    return [*lean, *({"grid": way.grid, "forward": str(way.profile)} for way in ways)]


def scratch_ways(size: int, grid: tuple[int, int]) -> list[dict[str, Any]]:
    """Whole maps in memory and in files; groups that meet at norms alone, and wherever that may gain."""
    layers = find_tileable_prefix(network(size, frozen=False), (3, size, size)).layers
    norms, points = str(one_group(layers.cuts)), str(Profile(group_boundaries(layers)))
    ways = ((False, norms), (True, norms), (True, points))
    return [{"grid": grid, "forward": profile, "scratch": scratch} for scratch, profile in ways]
