"""What a layer holds in memory while an exit is tested, from passes on the meta device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from snugfit._core.profile import Profile
from snugfit.local.assignment import Layout
from snugfit.memory.tensors import LiveBytes
from snugfit.strategies.blockwise.blocks import IMAGE_VALUE_BYTES
from snugfit.strategies.blockwise.config import LayerCost

IMAGES = 2
"""Images in a pass on the meta device."""


def exit_costs(layout: Layout, exit_unit: int | None = None) -> tuple[LayerCost, ...]:
    """Bytes of a layer's weights and of one image, for the layers that may need most while an exit is tested.

    Args:
        layout: one module per unit, on the meta device.
        exit_unit: the exit's unit; by default all exits are considered.
    """
    units = layout.chain.units if exit_unit is None else layout.chain.units[: exit_unit + 1]
    images = IMAGE_VALUE_BYTES * math.prod(units[0].input_shape)
    found: list[LayerCost] = []
    for unit in copy.deepcopy(units):
        found += _pass(unit.module, unit.module.forward, unit.input_shape)
    for index in range(len(units)) if exit_unit is None else (exit_unit,):
        unit, loss = units[index], copy.deepcopy(layout.make_loss(index).classifier())
        found += _pass(loss, loss.predict, unit.map_shape if loss.before_pool else unit.output_shape)
    return tuple((weights, size + images) for weights, size in _largest(found))


def in_memory(layers: Iterable[LayerCost], profile: Profile, device: str) -> list[LayerCost]:
    """Bytes of weights in private memory, and of one image, at every layer while an exit is tested.

    On the CPU weights are memory-mapped files, which do not count. Those of the current layer are in memory twice: in
    the layout of its input and in oneDNN's layout. On other devices the weights are at most the whole network's.
    """
    if device == "cpu":
        return [(2 * weights, size) for weights, size in layers]
    return [(sum(unit.weight_bytes for unit in profile.units), size) for _, size in layers]


def bytes_of_test(layers: Iterable[LayerCost], images: int) -> int:
    """Upper bound of the bytes of so many images and of the current layer's weights while an exit is tested."""
    return max(weights + size * images for weights, size in layers)


def _pass(module: nn.Module, forward: Callable[[Tensor], object], shape: Sequence[int]) -> list[LayerCost]:
    """Bytes of weights and of one image in memory at every layer, and at the peak of feature maps.

    ``forward`` takes images (B, ...). It is not called through the module, whose call would keep its input.
    """
    memory_format = torch.channels_last if len(shape) == 3 else torch.contiguous_format
    module.to("meta")  # buffers that are not stored have their values after training
    counter, found = LiveBytes([*module.eval().parameters(), *module.buffers()]), list[LayerCost]()
    held, others = counter.live, {id(each): each.nbytes for each in module.parameters()}

    def note(layer: nn.Module, *_: object) -> None:
        own = {id(each): each.nbytes for each in layer.parameters(recurse=False)}
        found.append((max(own.values(), default=0), -(-(counter.live - held) // IMAGES)))
        if not any(layer.children()):
            for key in own:
                others.pop(key, None)

    for layer in module.modules():
        layer.register_forward_hook(note)
    with torch.no_grad(), counter:
        forward(torch.empty((IMAGES, *shape), device="meta", memory_format=memory_format))
    # weights that no layer without children reads may be read at the peak: those of functional calls and of attention
    return [*found, (max(others.values(), default=0), -(-(counter.peak - held) // IMAGES))]


def _largest(costs: Iterable[LayerCost]) -> list[LayerCost]:
    """Those that no other exceeds both in weights and in bytes of an image; the most weights first."""
    found: list[LayerCost] = []
    for weights, size in sorted(costs, reverse=True):
        if not found or size > found[-1][1]:
            found.append((weights, size))
    return found
