"""What a layer holds in memory while an exit is tested, from passes on the meta device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from snugfit.local.assignment import Layout
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.blockwise.blocks import IMAGE_VALUE_BYTES
from snugfit.strategies.blockwise.config import LayerCost

IMAGES = 2
"""Images in a pass on the meta device."""


def exit_costs(layout: Layout) -> tuple[LayerCost, ...]:
    """Bytes of a layer's weights and of one image, for the layers that may need most while an exit is tested.

    They are found among all units, and the classifiers of all exits.

    Args:
        layout: one module per unit, on the meta device.
    """
    images = IMAGE_VALUE_BYTES * math.prod(layout.chain.units[0].input_shape)
    found = [_pass(unit.module, unit.module.forward, unit.input_shape) for unit in copy.deepcopy(layout.chain.units)]
    for index, unit in enumerate(layout.chain.units):
        loss = copy.deepcopy(layout.make_loss(index).classifier())
        found.append(_pass(loss, loss.predict, unit.map_shape if loss.before_pool else unit.output_shape))
    return tuple((weights, size + images) for weights, size in _largest(found))


def _pass(module: nn.Module, forward: Callable[[Tensor], object], shape: Sequence[int]) -> LayerCost:
    """Bytes of the largest layer's weights, and of one image's feature maps with the module's input.

    ``forward`` is not called through the module, whose call would keep the input until it returns.
    """
    memory_format = torch.channels_last if len(shape) == 3 else torch.contiguous_format
    module.eval()
    held = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    with torch.no_grad():
        peak = tensor_peak_bytes(
            lambda: forward(torch.empty((IMAGES, *shape), device="meta", memory_format=memory_format)), [module]
        )
    return max((each.nbytes for each in module.parameters()), default=0), -(-(peak - held) // IMAGES)


def _largest(costs: Iterable[LayerCost]) -> list[LayerCost]:
    """Those that no other exceeds both in weights and in bytes of an image; the most weights first."""
    found: list[LayerCost] = []
    for weights, size in sorted(costs, reverse=True):
        if not found or size > found[-1][1]:
            found.append((weights, size))
    return found
