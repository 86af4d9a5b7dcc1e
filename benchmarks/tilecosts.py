"""Claim: the cost model gives Figure 5.2 of the Tiled paper: computation, communication and the best groups of YOLOv2.

Nothing runs: regions of the first 16 layers of YOLOv2 at 608x608 on 3x3 tiles are counted. The paper prints curves
without numbers, so that shapes are compared: which groups win, and what grows with the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import DEFAULTS, ROOT, Cell, Options, program
from benchmarks.store import ResultFile, finish, markdown, note
from benchmarks.yolo_tiles import layers
from snugfit.tiling.grouping import CostModel, Direction, Prices, Profile, cheapest, every_cut, one_group
from snugfit.tiling.layers import Tiling, tiling_of
from snugfit.tiling.step_cost import FLOAT

GRID = (3, 3)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
RATIOS = tuple(10 ** (step / 4) for step in range(0, 25))
"""Cost of sending a value over that of a multiply-accumulate."""
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
FIGURE = ROOT / "docs" / "figures" / "tiled_costs.svg"
NAMES = {"one": "1 group", "every": "16 groups", "best": "least sent"}

app = program("tilecosts")


@app.default
def main(*, figure: Path = FIGURE, options: Options = DEFAULTS) -> None:
    """Count what Figure 5.2 shows, and draw it.

    For example: python -m benchmarks.tilecosts

    Args:
        figure: where the picture goes.
        options: what every benchmark takes; only ``results`` and ``again`` are used.
    """
    results = ResultFile("tilecosts", options)
    cell = results.once("figure 5.2", count)
    from benchmarks.tilecosts_figure import draw

    draw(cell, figure)
    note(f"figure: {figure}")
    finish(results, render)


def count() -> Cell:
    """All five panels as numbers, per tile on average; of the middle tile, with eight neighbours, in (d) and (e)."""
    network = layers()
    tiling = tiling_of(network, GRID)
    profiles = {each: _profiles(tiling, each) for each in DIRECTIONS}
    return {
        "profiles": {each: {name: str(found) for name, found in named.items()} for each, named in profiles.items()},
        "macs": _of_profiles(tiling, profiles, lambda work: work.macs),
        "halo_floats": _of_profiles(tiling, profiles, lambda work: work.elements),
        "components_mb": [_components(tiling, profiles, batch) for batch in BATCHES],
        "ratios": {each: [_ratio(tiling, each, ratio) for ratio in RATIOS] for each in DIRECTIONS},
    }


def _profiles(tiling: Tiling, direction: Direction) -> dict[str, Profile]:
    cuts = tiling.layers.cuts
    sending = _middle(tiling, Prices(0.0, 1.0), direction)
    return {"one": one_group(cuts), "every": every_cut(cuts), "best": sending[0]}


def _of_profiles(
    tiling: Tiling, profiles: dict[Direction, dict[str, Profile]], value: Callable[[Any], int]
) -> dict[str, dict[str, float]]:
    """Means over tiles, by direction and profile."""
    model = CostModel(tiling, [Prices(1.0, 0.0)])

    def mean(profile: Profile, direction: Direction) -> float:
        works = [work for group in profile.groups for work in model.work(*group, direction)]
        return sum(map(value, works)) / len(tiling.tiles)

    return {
        direction: {name: mean(profile, direction) for name, profile in named.items()}
        for direction, named in profiles.items()
    }


def _components(tiling: Tiling, profiles: dict[Direction, dict[str, Profile]], batch: int) -> dict[str, float]:
    """MB that a tile sends and is sent for a batch, on average; weights travel to the gateway and back."""
    maps, tiles = tiling.layers.maps, len(tiling.tiles)
    halos = _of_profiles(tiling, profiles, lambda work: work.elements)
    floats = {
        "weights": 2 * sum(each.weights for each in tiling.layers.layers),
        "samples": batch * (maps[0].elements + 2 * maps[-1].elements) / tiles,
        **{f"halos, {NAMES[name]}": batch * sum(halos[each][name] for each in DIRECTIONS) for name in NAMES},
    }
    return {"batch": batch, **{name: FLOAT * value / 1e6 for name, value in floats.items()}}


def _middle(tiling: Tiling, prices: Prices, direction: Direction) -> tuple[Profile, Callable[[Profile], float]]:
    """The cheapest profile of the middle tile, and what others cost it."""
    network, tile = tiling.layers, (GRID[0] // 2, GRID[1] // 2)
    model, index = CostModel(tiling, [prices]), tiling.tiles.index(tile)
    known: dict[tuple[int, int], float] = {}

    def cost(start: int, stop: int) -> float:
        if (start, stop) not in known:
            known[start, stop] = prices.of(model.work(start, stop, direction)[index])
        return known[start, stop]

    return cheapest(network.cuts, cost), lambda profile: sum(cost(*group) for group in profile.groups)


def _ratio(tiling: Tiling, direction: Direction, ratio: float) -> dict[str, Any]:
    """Costs over those of the cheapest profile."""
    best, cost = _middle(tiling, Prices(1.0, ratio), direction)
    corners = {"one": one_group(tiling.layers.cuts), "every": every_cut(tiling.layers.cuts)}
    shares = {name: cost(profile) / cost(best) for name, profile in corners.items()}
    return {"ratio": ratio, "best": str(best), "groups": len(best.groups), **shares}


def render(cells: list[Cell]) -> str:
    """What each panel says."""
    found = [cell for cell in cells if "ratios" in cell]
    if not found:
        return "no finished run"
    cell = found[-1]
    rows = [
        (direction, NAMES[name], f"`{profile}`".replace("|", "\\|"), f"{cell['macs'][direction][name] / 1e9:.3f}",
         f"{FLOAT * cell['halo_floats'][direction][name] / 1e3:.1f}")
        for direction in DIRECTIONS for name, profile in cell["profiles"][direction].items()
    ]  # fmt: skip
    groups = markdown(("pass", "groups", "profile", "GMAC per tile", "halo per tile (kB)"), rows)
    shown = [each for each in cell["components_mb"] if each["batch"] in (1, 8, 64)]
    names = [name for name in shown[0] if name != "batch"]
    parts = markdown(
        ("batch", *names), [(each["batch"], *(f"{each[name]:.2f}" for name in names)) for each in shown]
    )  # fmt: skip
    return f"{groups}\n\nMB per tile, as Figure 5.2(c):\n\n{parts}\n\n{_crossings(cell)}"


def _crossings(cell: Cell) -> str:
    """Which groups win as sending becomes dearer."""
    lines = []
    for direction in DIRECTIONS:
        found = cell["ratios"][direction]
        changes = [found[0], *(b for a, b in pairwise(found) if a["groups"] != b["groups"])]
        best = ", ".join(f"from {each['ratio']:.3g}: {each['groups']}" for each in changes)
        crossed = [each["ratio"] for each in found if each["one"] < each["every"]]
        where = f"1 group beats 16 from a ratio of {min(crossed):.3g}" if crossed else "16 groups always beat 1"
        lines.append(
            f"- {direction}: groups of the cheapest profile by cost of a value sent over a MAC {best}; {where}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    app()
