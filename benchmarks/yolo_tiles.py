"""The first 16 layers of YOLOv2 as the cost model sees them: convolutions and pools alone, as in the Tiled paper."""

from __future__ import annotations

from snugfit._models.yolo import LAYERS
from snugfit.tiling.geometry import Window
from snugfit.tiling.grouping import Profile
from snugfit.tiling.layers import Layer, Layers, MapSize, tiling_of
from snugfit.tiling.schedule import BackwardRules, Schedule

SIDE = 608
_POOL = Window(2, 2)


def layers() -> Layers:
    """At 608x608; norms and activations are left out, as the paper's cost model leaves them out."""
    made, channels = list[tuple[Layer, int]](), 3
    for number, each in enumerate(LAYERS):
        if isinstance(each, str):
            made.append((Layer(f"pool{number}", (number,), _POOL, _POOL), channels))
            continue
        outputs, kernel = each
        window = Window(kernel, 1, kernel // 2, kernel // 2)
        size = kernel * kernel * channels * outputs
        made.append((Layer(f"conv{number}", (number,), window, window, size, size), outputs))
        channels = outputs
    return Layers.of(MapSize(3, SIDE, SIDE), made)


def schedule(network: Layers, grid: tuple[int, int], forward: Profile, backward: Profile) -> Schedule:
    """A training step that keeps the maps that weights and pools read."""
    convolutions = [each.macs > 0 for each in network.layers]
    reads = ["core" if each else "input" for each in convolutions]
    return Schedule(tiling_of(network, grid), forward, backward, BackwardRules.of(network, convolutions, reads))  # type: ignore[arg-type]
