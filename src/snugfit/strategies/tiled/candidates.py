"""The grids and groups that are worth measuring."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar, cast

from torch import fx

from snugfit._chain import Chain
from snugfit._core.hardware import Cluster, Link, Rank, uniform_cluster
from snugfit.errors import UsageError
from snugfit.strategies.micro_batch import MicroBatching
from snugfit.strategies.tiled.config import TiledOptions
from snugfit.strategies.tiled.network_overhead import network_overhead, rest_macs, step_cost
from snugfit.tiling.candidates import (
    candidates_on_one_device,
    group_boundaries,
    most_square_grid,
    scratch_bytes,
    subsample,
)
from snugfit.tiling.exchange import cells_of
from snugfit.tiling.grouping import CostModel, Direction, Profile, every_cut, named_profile, one_group, prices_of
from snugfit.tiling.layers import Layers, Shares, require_grid, shares_by_speed, tiling_of
from snugfit.tiling.operators import TileablePrefix
from snugfit.tiling.plan import TilePlan
from snugfit.tiling.step_cost import Prediction
from snugfit.tiling.tileable_prefix import find_tileable_prefix
from snugfit.tiling.transport import world_size

GRIDS = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8))
"""Candidate grids on one device."""
TYPICAL_SPEED, TYPICAL_LINK = 20e9, Link(0, 1, 1e8, 5e-4)
"""A device and a link if nothing was measured: 20 GMAC/s, 100 MB/s, half a millisecond."""
PREFIX = "tiled"


def typical_cluster(processes: int) -> Cluster:
    """A cluster of typical devices and links."""
    return uniform_cluster(processes, Rank(0, "typical", 1, TYPICAL_SPEED, 0), TYPICAL_LINK)


@dataclass(frozen=True)
class TiledSettings(TiledOptions, MicroBatching):
    """Settings of ``tiled``: its options, of which ``propose`` replaces those that are ``auto``.

    Attributes:
        processes: number of processes.
        scratch_bytes: bytes of scratch files per image; filled in by ``propose``, like the next ones.
        shares: shares of rows and columns, as :func:`format_shares` prints them.
        network: the overhead of the network.
    """

    name: ClassVar[str] = "tiled"
    exact: ClassVar[bool] = True

    processes: int = field(default_factory=world_size)
    scratch_bytes: int = 0
    shares: str = ""
    network: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processes == 1 and self.replicas > 1:
            raise UsageError(f"--replicas must be at least 1, and 1 on a single process, not {self.replicas}.")
        if self.tile_sizes == "speed" and self.cluster is None:
            raise UsageError("--tile-sizes speed needs the devices' speeds: add --cluster with a file of them.")
        if self.scratch == "on" and self.processes > 1:
            raise UsageError(
                "--scratch on requires one process, on one device: several processes keep no whole feature maps."
            )


def parse_grid(tiles: str) -> tuple[int, int] | None:
    """Parse tiles down and across, like ``2x3``; None for ``auto``."""
    if tiles == "auto":
        return None
    down, across = map(int, tiles.split("x"))
    return down, across


def find_plans(
    chain: Chain, settings: TiledSettings, cluster: Cluster | None = None, images: int = 1
) -> dict[str, TilePlan]:
    """The plans that are worth measuring, the fastest first, by the names of their probes.

    Several processes choose groups for ``images`` of a tile at once: a step's divided by replicas.

    Raises:
        ModelError: no leading layer can be tiled, or the grid of ``tiles`` is too fine.
        UsageError: the network has no such groups.
    """
    module = cast(fx.GraphModule, copy.deepcopy(chain).to_module()).train()
    prefix = find_tileable_prefix(module, chain.input_shape)
    for text in {settings.forward_groups, settings.backward_groups} - {"auto"}:
        named_profile(text, prefix.layers.cuts)
    if settings.processes == 1:
        return {probe_name(plan): plan for plan in _plans_on_one_device(prefix.layers, settings)}
    plans = _plans_over_processes(prefix, settings, cluster or typical_cluster(settings.processes), images)
    if cluster is None:
        return {probe_name(plan): plan for plan in plans}
    macs = rest_macs(module, prefix)
    return {probe_name(plan, str(network_overhead(prefix, plan, cluster, macs))): plan for plan in plans}


def _plans_on_one_device(layers: Layers, settings: TiledSettings) -> list[TilePlan]:
    grid = parse_grid(settings.tiles)
    if grid is not None:
        require_grid(grid, layers.maps[-1])
    fitting = [each for each in GRIDS if max(each) <= min(layers.maps[-1].height, layers.maps[-1].width)]
    grids = [grid] if grid else fitting
    by_batch = any(each.sums for each in layers.layers)
    in_memory = [] if settings.scratch == "on" else _in_memory(layers, grids, settings.forward_groups)
    mapped = settings.scratch == "on" or (settings.scratch == "auto" and by_batch)
    return [*in_memory, *(_with_scratch(layers, grids, settings.forward_groups) if mapped else ())]


def _in_memory(layers: Layers, grids: Sequence[tuple[int, int]], groups: str) -> list[TilePlan]:
    if groups != "auto":
        return [_plan_on_one_device(each, groups) for each in grids]
    found = subsample(candidates_on_one_device(layers, grids))
    return [_plan_on_one_device(each.grid, str(each.profile)) for each in found]


def _with_scratch(layers: Layers, grids: Sequence[tuple[int, int]], groups: str) -> list[TilePlan]:
    """Plans with scratch files. Groups end wherever that may help, since feature maps between them take no memory."""
    profile = Profile(group_boundaries(layers)) if groups == "auto" else named_profile(groups, layers.cuts)
    finer = [each for each in grids if each != (1, 1)] or grids
    stored = scratch_bytes(layers, profile)
    return [_plan_on_one_device(each, str(profile), stored) for each in finer]


def _plan_on_one_device(grid: tuple[int, int], groups: str, scratch: int = 0) -> TilePlan:
    return TilePlan(grid, forward=groups, backward=groups, recompute=True, scratch=scratch)


def _plans_over_processes(
    prefix: TileablePrefix, settings: TiledSettings, cluster: Cluster, images: int
) -> list[TilePlan]:
    last = prefix.layers.maps[-1]
    grid = parse_grid(settings.tiles) or most_square_grid(
        max(settings.processes // settings.replicas, 1), last.height, last.width
    )
    require_grid(grid, last)
    owners = _tile_ranks(grid, settings.replicas, min(settings.processes, grid[0] * grid[1] * settings.replicas))
    shares = None
    if settings.tile_sizes == "speed":
        speeds = [cluster.ranks[rank].macs_per_second / owners[0].count(rank) for rank in owners[0]]
        shares = shares_by_speed(grid, speeds)
    replicas = zip(*(prices_of(cluster, each) for each in owners), strict=True)
    prices = [max(each, key=lambda price: price.mac) for each in replicas]  # the slowest device sets the pace
    model = CostModel(tiling_of(prefix.layers, grid, shares), prices, images, owners=owners[0])

    def groups(option: str, direction: Direction) -> list[str]:
        if option != "auto":
            return [option]
        boundaries = [
            group_boundaries(prefix.layers, direction, apart=apart) for apart in (False, direction == "backward")
        ]
        found = [profile for cuts in boundaries for profile in (model.cheapest(direction, cuts), every_cut(cuts))]
        return list(dict.fromkeys(map(str, (*found, one_group(prefix.layers.cuts)))))

    pairs = list(product(groups(settings.forward_groups, "forward"), groups(settings.backward_groups, "backward")))
    again = {"auto": (False, True), "on": (True,), "off": (False,)}[settings.recompute]
    plans = [
        TilePlan(grid, settings.replicas, *pair, False, settings.weight_update, shares, settings.rest) for pair in pairs
    ]
    fastest = partial(_fastest_plan, prefix, cluster, images * settings.replicas)
    return [fastest([replace(plan, recompute=each) for plan in plans]) for each in again]


def _fastest_plan(prefix: TileablePrefix, cluster: Cluster, images: int, plans: Sequence[TilePlan]) -> TilePlan:
    """The plan with the fastest step, whose cost depends on both profiles together.

    A forward pass that keeps its feature maps also computes what the groups of the backward pass read of them.
    """
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda plan: Prediction(step_cost(prefix, plan, cluster, images), cluster).seconds)


def _tile_ranks(grid: tuple[int, int], replicas: int, processes: int) -> list[list[int]]:
    """For each replica, the rank of each tile, row by row."""
    tiles = [(row, column) for row in range(grid[0]) for column in range(grid[1])]
    ranks = [cell.rank for cell in cells_of(tiles, replicas, processes)]
    return [ranks[start : start + len(tiles)] for start in range(0, len(ranks), len(tiles))]


def probe_name(plan: TilePlan, network: str = "") -> str:
    """The name of the probe of a plan; ``network`` is the text of a network's overhead."""
    down, across = plan.grid
    groups = (plan.forward, plan.backward, "again" if plan.recompute else "kept")
    parts = (PREFIX, f"{down}x{across}", plan.replicas, *groups, plan.update, plan.rest, format_shares(plan.shares))
    return ":".join(map(str, (*parts, plan.scratch, network)))


def settings_of_probe(key: str) -> dict[str, Any]:
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


def format_shares(shares: Shares | None) -> str:
    """Shares as text like ``3,1x1,1``; empty for equal ones."""
    return "x".join(",".join(f"{each:.6g}" for each in part) for part in shares or ())


def chosen_plan(settings: TiledSettings) -> TilePlan:
    """The plan of complete settings."""
    grid = parse_grid(settings.tiles)
    assert grid is not None and settings.recompute != "auto"
    shares: Shares | None = None
    if settings.shares:
        rows, columns = (tuple(map(float, part.split(","))) for part in settings.shares.split("x"))
        shares = rows, columns
    return TilePlan(
        grid,
        settings.replicas,
        settings.forward_groups,
        settings.backward_groups,
        settings.recompute == "on",
        settings.weight_update,
        shares,
        settings.rest,
        settings.scratch_bytes,
    )
