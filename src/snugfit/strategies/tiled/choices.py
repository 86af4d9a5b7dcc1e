"""Which grids and groups are worth measuring."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import fx

from snugfit.chain import Chain
from snugfit.core.request import Choice
from snugfit.errors import UsageError
from snugfit.tiling.geometry import balanced
from snugfit.tiling.grouping import CostModel, Direction, Prices
from snugfit.tiling.layers import Layers, Tiling
from snugfit.tiling.profile import named_profile
from snugfit.tiling.service import TilePlan, WeightUpdate, require_grid
from snugfit.tiling.stem import stem_of
from snugfit.tiling.ways import FLOAT, meeting_points, squarest, thinned, ways_on_one_device

GRIDS = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8))
"""That one device considers."""
TYPICAL = Prices(mac=1 / 20e9, element=FLOAT / 1e8, sync=5e-4)
"""Seconds of a device and a link that nobody has measured: 20 GMAC/s, 100 MB/s, half a millisecond."""
PREFIX = "tiled"


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
    def processes(self) -> int:
        """How many there are."""


def meant_grid(tiles: str) -> tuple[int, int] | None:
    """Tiles down and across of text like ``2x3``; None for ``auto``.

    Raises:
        UsageError: it is neither.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", tiles)
    if found is None and tiles != "auto":
        raise UsageError(f"--tiles is how many tiles down and across, like 2x3, or auto; not '{tiles}'.")
    return (int(found[1]), int(found[2])) if found else None


def plans_for(chain: Chain, wishes: Wishes, prices: Sequence[Prices] = (TYPICAL,)) -> dict[str, TilePlan]:
    """What is worth measuring, the fastest first, by the names of their probes.

    Args:
        chain: the network.
        wishes: the strategy's settings.
        prices: of the devices, one for all or one per tile.

    Raises:
        ModelError: no leading layer can be tiled, or the grid that is asked for is too fine.
        UsageError: the groups that are asked for are none of this network's.
    """
    module = cast(fx.GraphModule, copy.deepcopy(chain).to_module())
    layers = stem_of(module.train(), chain.input_shape).layers
    for text in {wishes.forward_groups, wishes.backward_groups} - {"auto"}:
        named_profile(text, layers.cuts)
    plans = _on_one(layers, wishes) if wishes.processes == 1 else _over_several(layers, wishes, prices)
    return {key_of(plan): plan for plan in plans}


def _on_one(layers: Layers, wishes: Wishes) -> list[TilePlan]:
    grid = meant_grid(wishes.tiles)
    if grid is not None:
        require_grid(grid, layers.maps[-1].height, layers.maps[-1].width)
    groups = wishes.forward_groups
    if groups != "auto":
        grids = (
            [grid]
            if grid
            else [each for each in GRIDS if each[0] <= min(layers.maps[-1].height, layers.maps[-1].width)]
        )
        return [TilePlan(each, forward=groups, backward=groups, recompute=True) for each in grids]
    ways = thinned(ways_on_one_device(layers, GRIDS if grid is None else (grid,)))
    return [TilePlan(each.grid, forward=str(each.profile), backward=str(each.profile), recompute=True) for each in ways]


def _over_several(layers: Layers, wishes: Wishes, prices: Sequence[Prices]) -> list[TilePlan]:
    last = layers.maps[-1]
    grid = meant_grid(wishes.tiles) or squarest(max(wishes.processes // wishes.replicas, 1), last.height, last.width)
    require_grid(grid, last.height, last.width)
    tiling = Tiling.of(layers, balanced(last.height, grid[0]), balanced(last.width, grid[1]))
    model, cuts = CostModel(tiling, prices), meeting_points(layers)

    def groups(wish: str, direction: Direction) -> str:
        return str(model.cheapest(direction, cuts)) if wish == "auto" else wish

    forward, backward = groups(wishes.forward_groups, "forward"), groups(wishes.backward_groups, "backward")
    again = {"auto": (False, True), "on": (True,), "off": (False,)}[wishes.recompute]
    return [
        TilePlan(grid, wishes.replicas, forward, backward, recompute, wishes.weight_update) for recompute in again
    ]  # fmt: skip


def key_of(plan: TilePlan) -> str:
    """The name of the probe of a plan."""
    again = "again" if plan.recompute else "kept"
    grid = f"{plan.grid[0]}x{plan.grid[1]}"
    return ":".join((PREFIX, grid, str(plan.replicas), plan.forward, plan.backward, again, plan.update))


def settings_of(key: str) -> dict[str, Any]:
    """The strategy's settings that a probe was measured with."""
    _, tiles, replicas, forward, backward, again, update = key.split(":")
    return {
        "tiles": tiles, "replicas": int(replicas), "forward_groups": forward, "backward_groups": backward,
        "recompute": "on" if again == "again" else "off", "weight_update": update,
    }  # fmt: skip


def chosen(wishes: Wishes) -> TilePlan:
    """The plan of settings that leave nothing open."""
    grid = meant_grid(wishes.tiles)
    assert grid is not None and wishes.recompute != "auto"
    groups = (wishes.forward_groups, wishes.backward_groups)
    return TilePlan(grid, wishes.replicas, *groups, wishes.recompute == "on", wishes.weight_update)
