"""Networks as tiling sees them."""

from snugfit.tiling.geometry import Interval, Window
from snugfit.tiling.layers import Layer, Layers, MapSize, Region


def square(start, stop):
    return Region(Interval(start, stop), Interval(start, stop))


def layer(name, reads, kernel=1, stride=1, padding=0, macs=0, weights=0, dilation=1):
    window = Window(kernel, stride, padding, padding, dilation)
    return Layer(name, reads, window, window, macs, weights)


def figure_4_4():
    """Two convolutions, the first of stride 2, and a pool on a 16x16 map (section 5.2's example)."""
    first, second = layer("conv", (0,), 3, 2, 1, macs=9), layer("conv", (1,), 3, 1, 1, macs=9)
    return Layers.of(MapSize(1, 16, 16), [(first, 1), (second, 1), (layer("pool", (2,), 2, 2), 1)])


YOLO = ((32, 3), 0, (64, 3), 0, (128, 3), (64, 1), (128, 3), 0, (256, 3), (128, 1), (256, 3), 0) + (
    (512, 3), (256, 1), (512, 3), (256, 1),
)  # fmt: skip


def yolo():
    """The first 16 layers of YOLOv2 at 608x608: channels and kernel of convolutions, 0 for pools."""
    made, channels = [], 3
    for number, each in enumerate(YOLO):
        if each:
            outputs, kernel = each
            size = kernel * kernel * channels * outputs
            made.append((layer("conv", (number,), kernel, 1, kernel // 2, size, size), outputs))
            channels = outputs
        else:
            made.append((layer("pool", (number,), 2, 2), channels))
    return Layers.of(MapSize(3, 608, 608), made)


def residual():
    """A convolution, a residual block that halves the map with a 1x1 shortcut, and a dilated convolution."""
    made = [
        (layer("stem", (0,), 3, 1, 1, macs=9), 4),
        (layer("main.0", (1,), 3, 2, 1, macs=36), 4),
        (layer("main.1", (2,), 3, 1, 1, macs=36), 4),
        (layer("shortcut", (1,), 1, 2, macs=16), 4),
        (layer("add", (3, 4)), 4),
        (layer("last", (5,), 3, 1, 2, macs=36, dilation=2), 2),
    ]
    return Layers.of(MapSize(3, 13, 17), made)
