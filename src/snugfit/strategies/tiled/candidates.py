"""Which grids and groups are worth measuring."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from itertools import product
from typing import Any, Protocol, cast

from torch import fx

from snugfit._chain import Chain
from snugfit._core.cluster import Cluster, Link, Rank, uniform_cluster
from snugfit._core.literals import Rest, TileSizes, WeightUpdate
from snugfit._core.options import Choice
from snugfit.errors import UsageError
from snugfit.strategies.tiled.network import network_of, rest_macs, step_of
from snugfit.tiling.candidates import (
    candidates_on_one_device,
    group_boundaries,
    most_square_grid,
    scratch_bytes,
    subsample,
)
from snugfit.tiling.grouping import CostModel, Direction, Prices
from snugfit.tiling.layers import Layers, require_grid
from snugfit.tiling.operators import TileablePrefix
from snugfit.tiling.plan import Shares, TilePlan, tiling_of
from snugfit.tiling.pricing import Prediction, prices_of, shares_by_speed
from snugfit.tiling.profile import Profile, every_cut, named_profile, one_group
from snugfit.tiling.routes import cells_of
from snugfit.tiling.tileable_prefix import find_tileable_prefix

GRIDS = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8))
"""That one device considers."""
TYPICAL_SPEED, TYPICAL_LINK = 20e9, Link(0, 1, 1e8, 5e-4)
"""A device and a link that nobody has measured: 20 GMAC/s, 100 MB/s, half a millisecond."""
PREFIX = "tiled"


def typical_cluster(processes: int) -> Cluster:
    """So many of them, where nothing was measured."""
    return uniform_cluster(processes, Rank(0, "typical", 1, TYPICAL_SPEED, 0), TYPICAL_LINK)


class Wishes(Protocol):
    """The settings of the strategy that choices depend on."""

    @property
    def tiles(self) -> str:
        """Tiles down and across, or ``auto``."""

    @property
    def forward_groups(self) -> str:
        """Groups, or ``auto``."""

    @property
    def backward_groups(self) -> str:
        """Groups, or ``auto``."""

    @property
    def recompute(self) -> Choice:
        """Whether maps are computed anew."""

    @property
    def replicas(self) -> int:
        """Shares of the batch."""

    @property
    def weight_update(self) -> WeightUpdate:
        """Where weights are updated."""

    @property
    def rest(self) -> Rest:
        """Who computes the layers behind the tiles."""

    @property
    def processes(self) -> int:
        """How many there are."""

    @property
    def tile_sizes(self) -> TileSizes:
        """What tiles are in proportion to."""

    @property
    def scratch(self) -> Choice:
        """Whether whole maps lie in memory-mapped files."""

    @property
    def scratch_bytes(self) -> int:
        """What they take there per image; filled in with the rest."""

    @property
    def shares(self) -> str:
        """Of rows and columns of tiles, as :func:`text_of` prints them; filled in with the rest."""


def meant_grid(tiles: str) -> tuple[int, int] | None:
    """Tiles down and across of text like ``2x3``; None for ``auto``.

    Raises:
        UsageError: it is neither.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", tiles)
    if found is None and tiles != "auto":
        raise UsageError(f"--tiles is how many tiles down and across, like 2x3, or auto; not '{tiles}'.")
    return (int(found[1]), int(found[2])) if found else None


def plans_for(chain: Chain, wishes: Wishes, cluster: Cluster | None = None, images: int = 1) -> dict[str, TilePlan]:
    """What is worth measuring, the fastest first, by the names of their probes.

    Args:
        chain: the network.
        wishes: the strategy's settings.
        cluster: the processes, where they were measured.
        images: of a tile at once, for which several processes choose groups; a step's, over replicas.

    Raises:
        ModelError: no leading layer can be tiled, or the grid that is asked for is too fine.
        UsageError: the groups that are asked for are none of this network's.
    """
    module = cast(fx.GraphModule, copy.deepcopy(chain).to_module()).train()
    prefix = find_tileable_prefix(module, chain.input_shape)
    for text in {wishes.forward_groups, wishes.backward_groups} - {"auto"}:
        named_profile(text, prefix.layers.cuts)
    if wishes.processes == 1:
        return {key_of(plan): plan for plan in _on_one(prefix.layers, wishes)}
    plans = _over_several(prefix, wishes, cluster or typical_cluster(wishes.processes), images)
    if cluster is None:
        return {key_of(plan): plan for plan in plans}
    macs = rest_macs(module, prefix)
    return {key_of(plan, str(network_of(prefix, plan, cluster, macs))): plan for plan in plans}


def _on_one(layers: Layers, wishes: Wishes) -> list[TilePlan]:
    grid = meant_grid(wishes.tiles)
    if grid is not None:
        require_grid(grid, layers.maps[-1])
    fitting = [each for each in GRIDS if max(each) <= min(layers.maps[-1].height, layers.maps[-1].width)]
    grids = [grid] if grid else fitting
    by_batch = any(each.sums for each in layers.layers)
    in_memory = [] if wishes.scratch == "on" else _in_memory(layers, grids, wishes.forward_groups)
    mapped = wishes.scratch == "on" or (wishes.scratch == "auto" and by_batch)
    return [*in_memory, *(_mapped(layers, grids, wishes.forward_groups) if mapped else ())]


def _in_memory(layers: Layers, grids: Sequence[tuple[int, int]], groups: str) -> list[TilePlan]:
    if groups != "auto":
        return [TilePlan(each, forward=groups, backward=groups, recompute=True) for each in grids]
    ways = subsample(candidates_on_one_device(layers, grids))
    return [TilePlan(each.grid, forward=str(each.profile), backward=str(each.profile), recompute=True) for each in ways]


def _mapped(layers: Layers, grids: Sequence[tuple[int, int]], groups: str) -> list[TilePlan]:
    """With whole maps in scratch files: groups meet wherever that may gain, for maps between them take no memory."""
    profile = Profile(group_boundaries(layers)) if groups == "auto" else named_profile(groups, layers.cuts)
    finer = [each for each in grids if each != (1, 1)] or grids
    stored = scratch_bytes(layers, profile)
    return [
        TilePlan(each, forward=str(profile), backward=str(profile), recompute=True, scratch=stored) for each in finer
    ]


def _over_several(prefix: TileablePrefix, wishes: Wishes, cluster: Cluster, images: int) -> list[TilePlan]:
    last = prefix.layers.maps[-1]
    grid = meant_grid(wishes.tiles) or most_square_grid(
        max(wishes.processes // wishes.replicas, 1), last.height, last.width
    )
    require_grid(grid, last)
    owners = owners_of(grid, wishes.replicas, min(wishes.processes, grid[0] * grid[1] * wishes.replicas))
    shares = by_speed(cluster, grid, owners[0]) if wishes.tile_sizes == "speed" else None
    prices = _dearest([prices_of(cluster, each) for each in owners])
    model = CostModel(tiling_of(prefix.layers, grid, shares), prices, images, owners=owners[0])

    def groups(wish: str, direction: Direction) -> list[str]:
        if wish != "auto":
            return [wish]
        ways = [group_boundaries(prefix.layers, direction, apart=apart) for apart in (False, direction == "backward")]
        found = [profile for cuts in ways for profile in (model.cheapest(direction, cuts), every_cut(cuts))]
        return list(dict.fromkeys(map(str, (*found, one_group(prefix.layers.cuts)))))

    pairs = list(product(groups(wishes.forward_groups, "forward"), groups(wishes.backward_groups, "backward")))
    again = {"auto": (False, True), "on": (True,), "off": (False,)}[wishes.recompute]
    return [
        _fastest(
            prefix,
            cluster,
            images * wishes.replicas,
            [
                TilePlan(grid, wishes.replicas, *pair, recompute, wishes.weight_update, shares, wishes.rest)
                for pair in pairs
            ],
        )
        for recompute in again
    ]


def _fastest(prefix: TileablePrefix, cluster: Cluster, images: int, plans: Sequence[TilePlan]) -> TilePlan:
    """The plan with the quickest step: what both profiles together cost, a profile by itself does not tell.

    A forward pass that keeps its maps covers what the backward pass reads of them, by the groups of that.
    """
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: Prediction(step_of(prefix, plan, cluster, images), cluster).seconds)


def owners_of(grid: tuple[int, int], replicas: int, processes: int) -> list[list[int]]:
    """Of every replica, the rank of each tile, row by row."""
    tiles = [(row, column) for row in range(grid[0]) for column in range(grid[1])]
    ranks = [cell.rank for cell in cells_of(tiles, replicas, processes)]
    return [ranks[start : start + len(tiles)] for start in range(0, len(ranks), len(tiles))]


def by_speed(cluster: Cluster, grid: tuple[int, int], owners: Sequence[int]) -> Shares:
    """Shares of rows and columns, so that tiles are in proportion to the speeds of the devices of one replica."""
    speeds = [cluster.ranks[rank].macs_per_second / owners.count(rank) for rank in owners]
    return shares_by_speed(grid, speeds)


def _dearest(prices: Sequence[Sequence[Prices]]) -> list[Prices]:
    """Of every tile, the prices of the slowest of the devices that run it for a replica each."""
    return [max(each, key=lambda price: price.mac) for each in zip(*prices, strict=True)]


def key_of(plan: TilePlan, network: str = "") -> str:
    """The name of the probe of a plan.

    Args:
        plan: the plan.
        network: what the network adds, as :class:`Network` prints.
    """
    again, scratch = "again" if plan.recompute else "kept", str(plan.scratch)
    grid = f"{plan.grid[0]}x{plan.grid[1]}"
    groups, update = (plan.forward, plan.backward, again), (plan.update, plan.rest)
    parts = (PREFIX, grid, str(plan.replicas), *groups, *update, text_of(plan.shares))
    return ":".join((*parts, scratch, network))


def settings_of(key: str) -> dict[str, Any]:
    """The strategy's settings that a probe was measured with."""
    _, tiles, replicas, forward, backward, again, update, rest, shares, scratch, network = key.split(":")
    return {
        "tiles": tiles,
        "replicas": int(replicas),
        "forward_groups": forward,
        "backward_groups": backward,
        "recompute": "on" if again == "again" else "off",
        "weight_update": update,
        "rest": rest,
        "shares": shares,
        "scratch": "on" if int(scratch) else "off",
        "scratch_bytes": int(scratch),
        "network": network,
    }


def text_of(shares: Shares | None) -> str:
    """Like ``3,1x1,1``; nothing for equal ones."""
    return "x".join(",".join(f"{each:.6g}" for each in part) for part in shares or ())


def shares_of(text: str) -> Shares | None:
    """Read shares as they print."""
    if not text:
        return None
    rows, columns = (tuple(map(float, part.split(","))) for part in text.split("x"))
    return rows, columns


def chosen(wishes: Wishes) -> TilePlan:
    """The plan of settings that leave nothing open."""
    grid = meant_grid(wishes.tiles)
    assert grid is not None and wishes.recompute != "auto"
    groups = (wishes.forward_groups, wishes.backward_groups)
    again, shares = wishes.recompute == "on", shares_of(wishes.shares)
    rest, scratch = wishes.rest, wishes.scratch_bytes
    return TilePlan(grid, wishes.replicas, *groups, again, wishes.weight_update, shares, rest, scratch)
