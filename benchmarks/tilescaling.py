"""Claim: tiles scale to larger clusters of weak devices as the Tiled paper found on 2 to 6: 2-15 times a single core.

A simulation: the cost model on the first 16 layers of YOLOv2 at 608x608, with constants of devices that are not at
hand. A device is one process that runs one tile per core; what its cores sum up travels once, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import DEFAULTS, Cell, Options, program
from benchmarks.store import ResultFile, finish, markdown
from benchmarks.yolo_tiles import layers, schedule
from snugfit._core.hardware import Cluster, Link, Rank, uniform_cluster
from snugfit._core.options import WeightUpdate
from snugfit.tiling.candidates import most_square_grid
from snugfit.tiling.cost_counter import Placement, count_step_cost
from snugfit.tiling.exchange import cells_of
from snugfit.tiling.grouping import CostModel, Profile, every_cut, one_group, prices_of
from snugfit.tiling.layers import Layers, tiling_of
from snugfit.tiling.step_cost import Prediction, StepCost

STEP_MACS = 38.68e9
"""Of a training step of one image on one tile: forward, gradients of maps but the image's, gradients of weights."""
PAPER_STEP_SECONDS = 420.0
"""Of one Raspberry Pi 3 core, section 6.1: "around 7 minutes"."""
DEVICES = (1, 2, 4, 6, 8, 16, 32, 64)
BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Device:
    """Constants of a device, and where they are from.

    Attributes:
        name: for tables.
        cores: each with a tile of its own.
        macs_per_second: of a core.
        bytes_per_second, latency_seconds: of a link between two devices.
        source: of the constants.
    """

    name: str
    cores: int
    macs_per_second: float
    bytes_per_second: float
    latency_seconds: float
    source: str

    def cluster(self, count: int) -> Cluster:
        """So many of them."""
        rank = Rank(0, self.name, self.cores, self.cores * self.macs_per_second, 0)
        return uniform_cluster(count, rank, Link(0, 1, self.bytes_per_second, self.latency_seconds))


PI = Device(
    "pi3", 4, STEP_MACS / PAPER_STEP_SECONDS, 12.5e6, 5e-4,
    "paper: 4 cores, 7 minutes for a step on one core, 100 Mbit/s; assumed: latency 0.5 ms",
)  # fmt: skip
JETSON_CPU = Device(
    "jetson-cpu", 4, 2 * PI.macs_per_second, 1.25e9, 2e-4,
    "paper: 4 cores, 10 Gbit/s; assumed: a core twice as fast as the Pi's, latency 0.2 ms",
)  # fmt: skip
JETSON_GPU = Device(
    "jetson-gpu", 1, 4e10, 1.25e9, 1e-3,
    "paper: one GPU of 128 CUDA cores, 10 Gbit/s; assumed: 40 GMAC/s, a third of its peak, and 1 ms for an exchange, "
    "copies from and to the GPU included",
)  # fmt: skip
KINDS = (PI, JETSON_CPU, JETSON_GPU)

app = program("tilescaling")


@app.default
def main(*, counts: tuple[int, ...] = DEVICES, options: Options = DEFAULTS) -> None:
    """Simulate clusters of growing size.

    For example: python -m benchmarks.tilescaling --counts 2 --counts 6

    Args:
        counts: of devices.
        options: what every benchmark takes; only ``results`` and ``again`` are used.
    """
    results, network = ResultFile("tilescaling", options), layers()
    for device in KINDS:
        for count in counts:
            label = f"simulate {device.name} x {count}"
            results.once(label, lambda d=device, n=count: simulate(network, d, n), device=asdict(device), count=count)  # type: ignore[misc]
    finish(results, render)


def simulate(network: Layers, device: Device, count: int) -> Cell:
    """A cluster at every batch: the quickest groups, and seconds by what they are spent on."""
    last, cluster = network.maps[-1], device.cluster(count)
    grid = most_square_grid(device.cores * count, last.height, last.width)
    tiling = tiling_of(network, grid)
    owners = [cell.rank for cell in cells_of(tiling.tiles, 1, count)]
    model = CostModel(tiling, prices_of(cluster, owners))
    corners = (every_cut(network.cuts), one_group(network.cuts))
    pairs = list(dict.fromkeys([(model.cheapest("forward"), model.cheapest("backward")), *((e, e) for e in corners)]))
    found = [_at(network, grid, device, cluster, batch, pairs) for batch in BATCHES]
    return {"grid": list(grid), "batches": found}


def _at(
    network: Layers, grid: tuple[int, int], device: Device, cluster: Cluster, batch: int,
    pairs: list[tuple[Profile, Profile]],
) -> dict[str, Any]:  # fmt: skip
    steps = [(_step(network, grid, cluster, batch, pair, "gateway"), pair) for pair in pairs]
    step, pair = min(steps, key=lambda each: Prediction(each[0], cluster).seconds)
    ring = Prediction(_step(network, grid, cluster, batch, pair, "all-reduce"), cluster)
    alone = _step(network, (1, 1), device.cluster(1), batch, (one_group(network.cuts),) * 2, "gateway")
    baseline, seconds = alone.macs(0) / device.macs_per_second, Prediction(step, cluster)
    weights = seconds.sending("weights")
    return {
        "batch": batch, "forward": str(pair[0]), "backward": str(pair[1]), "baseline_seconds": baseline,
        "seconds": seconds.seconds, "computing": seconds.computing(), "weights": weights,
        "halos": seconds.sending("forward halo", "backward halo"),
        "samples": seconds.sending("images", "last map", "gradient"), "speedup": baseline / seconds.seconds,
        "speedup_without_weights": baseline / (seconds.seconds - weights),
        "speedup_all_reduce": baseline / ring.seconds,
        "one_group_seconds": Prediction(steps[-1][0], cluster).seconds,
        "kept_bytes": max(step.kept_bytes), "kept_bytes_alone": alone.kept_bytes[0],
    }  # fmt: skip


def _step(
    network: Layers, grid: tuple[int, int], cluster: Cluster, batch: int, pair: tuple[Profile, Profile],
    update: WeightUpdate,
) -> StepCost:  # fmt: skip
    plan = schedule(network, grid, *pair)
    cells = cells_of(plan.tiling.tiles, 1, cluster.size)
    return count_step_cost(plan, cells, batch, Placement(update=update), processes=cluster.size)


def render(cells: list[Cell]) -> str:
    """Speed-ups over one core (or one GPU), and where the time goes."""
    parts = [_of_kind(name, found) for name, found in _by_kind([cell for cell in cells if "batches" in cell])]
    return "\n\n".join(parts) or "no finished run"


def _by_kind(cells: list[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    for name in dict.fromkeys(cell["device"]["name"] for cell in cells):
        found = [cell for cell in cells if cell["device"]["name"] == name]
        yield name, sorted(found, key=lambda cell: int(cell["count"]))


def _of_kind(name: str, cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        first, last = cell["batches"][0], cell["batches"][-1]
        rows.append((
            cell["count"], f"{cell['grid'][0]}x{cell['grid'][1]}",
            *(f"{each['speedup']:.1f}" for each in cell["batches"]), f"{last['speedup_without_weights']:.1f}",
            f"{last['speedup_all_reduce']:.1f}",
            *(f"{first[part]:.3g}" for part in ("seconds", "computing", "halos", "samples", "weights")),
            f"{first['kept_bytes'] / 1e6:.1f}",
        ))  # fmt: skip
    batches = [f"batch {each['batch']}" for each in cells[0]["batches"]]
    largest = f"{cells[0]['batches'][-1]['batch']}"
    header = (
        "devices", "tiles", *batches, f"batch {largest}, no weights", f"batch {largest}, all-reduce",
        "seconds (batch 1)", "computing", "halos", "samples", "weights", "maps kept (MB)",
    )  # fmt: skip
    one = "one core of it" if cells[0]["device"]["cores"] > 1 else "one of it"
    return f"**{name}** ({cells[0]['device']['source']}); times as fast as {one}:\n\n{markdown(header, rows)}"


if __name__ == "__main__":
    app()
