"""A small side network for a frozen backbone (Rep-Net, as Yoosefi et al. use it in sections I and VI).

A side module reads its block's input, at half the resolution, and its output is added to the block's:
``x = block(x) + side(x)``. The first one reads the image. At initialisation every output is zero, so that the network
computes the same as the backbone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from torch import fx, nn

from snugfit._chain import ModuleBlock, find_blocks
from snugfit._chain.blocks import SIDE_NETWORK as SIDE
from snugfit._chain.propagation import node_shapes
from snugfit._chain.subgraph import input_node
from snugfit._chain.tracing import assemble, attributes_of, is_torch_class
from snugfit.errors import ModelError, is_out_of_memory
from snugfit.lean import StandardisedConv2d, disable_inplace

IMAGE_POOL = 4
"""Window of the average pool through which the first side module reads the image."""
_POOL = 2
_SMALL_MAP = 7
"""Largest side of a feature map with a 3x3 kernel instead of 5x5."""
_DIVISOR = 8
_EPS = 1e-3
"""Of the side modules' BatchNorm."""
_LARGEST_SIZE = 4096
"""Largest image side that an error message looks for."""


class ZeroScaledBatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` whose scale starts at zero, so that its branch adds nothing before the first step."""

    def reset_parameters(self) -> None:
        """Set scale and shift to 0 and reset the statistics."""
        super().reset_parameters()
        if self.affine:
            nn.init.zeros_(self.weight)


def side_positions(module: fx.GraphModule, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Indices of the blocks, in order of execution, that get a side module.

    They are the first blocks of each run of blocks with equal output shapes whose output side is at most a quarter of
    the image's (rounded up) and which have a spatial convolution; the stem is none. For MobileNetV2 at 224x224 these
    are 2, 4, 7, 11, 14 and 17, as in the paper's section VI.

    Raises:
        ModelError: no block is usable, or the image is too small.
    """
    return tuple(plan.position for plan in _checked_plans(module, find_blocks(module, input_shape), input_shape))


def attach_side_network(module: fx.GraphModule, input_shape: tuple[int, ...], *, width: float = 1.0) -> fx.GraphModule:
    """Attach a side network to a backbone; the result computes the same before training.

    The backbone's layers and parameters are shared, keep their names and are not frozen here. The side module of block
    k is named ``side.k``. It pools 2x2, convolves 5x5 (3x3 on feature maps of at most 7x7) with 2 groups, normalises,
    rectifies, convolves 1x1, normalises with a scale of zero, and is upsampled to the block's output; filters are
    standardised. Side modules have their own BatchNorm, which uses batch statistics in training while the backbone's is
    in evaluation mode; the caller sets both.

    Args:
        module: a traced network, such as ``Chain.to_module()``; on the meta device or any other.
        input_shape: channels, height, width of one image; the new network is for this size alone.
        width: the first convolution has this many times its input's channels, rounded to eights.

    Raises:
        ModelError: no block is usable, the image is too small, or the backbone has modules named ``side``.
    """
    if any(name.split(".")[0] == SIDE for name, _ in module.named_modules()):
        raise ModelError(f"the backbone has modules named '{SIDE}', as the side network would be; rename them.")
    if width <= 0:
        raise ModelError(f"a side network of width {width:g} has no channels; give a width above 0.")
    blocks = find_blocks(module, input_shape)
    plans = _checked_plans(module, blocks, input_shape)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    attributes = attributes_of(module)
    parameter = next(module.parameters())
    for plan in plans:
        layers = {f"{SIDE}.{plan.position}.{name}": layer for name, layer in _layers(plan, width, parameter).items()}
        attributes.update(layers)
        _connect(graph, blocks[plan.position], copies, layers, attributes)
    return _assembled(module, graph, attributes)


@dataclass(frozen=True)
class _Plan:
    """The inputs of a side module; shapes are of one sample."""

    position: int
    first: bool
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]

    @property
    def map_side(self) -> int:
        """Longer side of the feature map that the module reads, behind the image's own pool."""
        return max(self.input_shape[1:]) // (IMAGE_POOL if self.first else 1)

    @property
    def pooled(self) -> tuple[int, ...]:
        """Height and width of the feature map that is convolved."""
        return tuple(size // (IMAGE_POOL * _POOL if self.first else _POOL) for size in self.input_shape[1:])


def _checked_plans(
    module: fx.GraphModule, blocks: tuple[ModuleBlock, ...], image: tuple[int, ...]
) -> tuple[_Plan, ...]:
    plans = _plans(module, blocks, image)
    if not plans and not _convolves_pixels(module, image):
        raise ModelError(
            "the backbone has no block for a side network: none behind the stem has a convolution wider than 1x1 and "
            "an output of at most a quarter of the image's side. Use another backbone."
        )
    if _is_too_small(module, plans, image):
        height, width = image[1:]
        smallest = _smallest_size(module, image[0], max(height, width))
        advice = f"use {smallest}x{smallest} or larger" if smallest else "and this backbone takes no larger ones"
        raise ModelError(
            f"images of {height}x{width} are too small for a side network, whose pools would leave no pixels: {advice}."
        )
    return plans


def _plans(module: fx.GraphModule, blocks: tuple[ModuleBlock, ...], image: tuple[int, ...]) -> tuple[_Plan, ...]:
    plans: list[_Plan] = []
    limits = [-(-size // 4) for size in image[1:]]
    for index in range(1, len(blocks)):
        block, before = blocks[index], blocks[index - 1]
        is_map = len(block.input_shape) == len(block.output_shape) == 3
        if not is_map or block.output_shape == before.output_shape or not _is_spatial(module, block):
            continue
        if all(size <= limit for size, limit in zip(block.output_shape[1:], limits, strict=True)):
            plans.append(_Plan(index, not plans, block.input_shape if plans else image, block.output_shape))
    return tuple(plans)


def _is_spatial(module: fx.GraphModule, block: ModuleBlock) -> bool:
    return any(isinstance(layer, nn.Conv2d) and max(layer.kernel_size) > 1 for layer in block.layers(module))


def _is_too_small(module: fx.GraphModule, plans: tuple[_Plan, ...], image: tuple[int, ...]) -> bool:
    """Whether a pool leaves nothing, or blocks without a side module read single pixels."""
    return not plans or any(min(plan.pooled) == 0 for plan in plans) or _convolves_pixels(module, image)


def _convolves_pixels(module: fx.GraphModule, image: tuple[int, ...]) -> bool:
    """Whether a convolution wider than 1x1 reads a feature map of one pixel."""
    shapes = node_shapes(module, image)
    for node in module.graph.nodes:
        layer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, nn.Conv2d) and max(layer.kernel_size) > 1:
            size = (shapes[node.all_input_nodes[0]] or ())[2:]
            if min(size, default=2) < _POOL:
                return True
    return False


def _layers(plan: _Plan, width: float, like: nn.Parameter) -> dict[str, nn.Module]:
    """Layers of a side module in order, by name; on the device and in the precision of a parameter.

    Initial weights come from the processor's generator: they are the same on every device.
    """
    channels, outputs = plan.input_shape[0], plan.output_shape[0]
    middle = _make_divisible(channels * width)
    kernel = 3 if plan.map_side <= _SMALL_MAP else 5
    groups = 1 if plan.first or channels % 2 else 2
    layers: dict[str, nn.Module] = {"shrink": nn.AvgPool2d(IMAGE_POOL)} if plan.first else {}
    with torch.device("meta" if like.is_meta else "cpu"):
        layers |= {
            "pool": nn.AvgPool2d(_POOL),
            "conv": StandardisedConv2d(channels, middle, kernel, padding=kernel // 2, groups=groups, bias=False),
            "norm": nn.BatchNorm2d(middle, eps=_EPS),
            "activation": nn.ReLU(inplace=True),
            "mix": StandardisedConv2d(middle, outputs, 1, bias=False),
            "scale": ZeroScaledBatchNorm2d(outputs, eps=_EPS),
        }
    if plan.pooled != plan.output_shape[1:]:
        layers["enlarge"] = nn.Upsample(plan.output_shape[1:], mode="bilinear", align_corners=False)
    return {name: layer.to(like.device, like.dtype) for name, layer in layers.items()}


def _make_divisible(channels: float) -> int:
    """The nearest multiple of 8, but not less than 8 or nine tenths of the channels (MobileNet's rule)."""
    rounded = max(_DIVISOR, int(channels + _DIVISOR / 2) // _DIVISOR * _DIVISOR)
    return rounded + _DIVISOR if rounded < 0.9 * channels else rounded


def _connect(
    graph: fx.Graph,
    block: ModuleBlock,
    copies: dict[fx.Node, fx.Node],
    layers: dict[str, nn.Module],
    attributes: dict[str, Any],
) -> None:
    """Insert a side module's layers into the graph: x = block(x) + side(x).

    They run after the block, so that the tensors that they save do not raise its peak. A module other than the first
    pools its input earlier, because the block's input may be freed (or overwritten) by then.
    """
    names = list(layers)
    point = last = copies[block.nodes[-1]]
    if "shrink" in names[0]:
        entry = input_node(graph)
    else:
        entry = copies[block.entry]
        with _insertion_point(graph, copies[block.nodes[0]], attributes):
            entry = graph.call_module(names.pop(0), (entry,))
        if len(block.nodes) == 1:  # the pool may stand behind the block then
            point = entry if last < entry else last
    value = entry
    for name in names:
        with graph.inserting_after(point):
            value = point = graph.call_module(name, (value,))
    users = list(last.users)
    with graph.inserting_after(point):
        total = graph.call_function(add, (last, value))
    for user in users:
        user.replace_input_with(last, total)
    copies[block.nodes[-1]] = total  # what the next block reads, and its side module with it


def _insertion_point(graph: fx.Graph, first: fx.Node, attributes: dict[str, Any]) -> AbstractContextManager[None]:
    """The insertion point at which a block's input is intact: after its first node if that does not change it."""
    layer = attributes[str(first.target)] if first.op == "call_module" else None
    reads_only = layer is not None and is_torch_class(layer) and not getattr(layer, "inplace", False)
    place: AbstractContextManager[None] = graph.inserting_after(first) if reads_only else graph.inserting_before(first)
    return place


def _assembled(backbone: fx.GraphModule, graph: fx.Graph, attributes: dict[str, Any]) -> fx.GraphModule:
    stored = set(backbone.state_dict())
    attached = assemble(graph, attributes, stored)
    for owner in sorted({name.rpartition(".")[0] for name in stored - set(attached.state_dict())}):
        attached.add_submodule(owner, backbone.get_submodule(owner))  # layers that forward never calls
    attached.training = backbone.training
    disable_inplace(attached)  # a side module may read what the backbone overwrites
    return attached


def _smallest_size(module: fx.GraphModule, channels: int, too_small: int) -> int | None:
    """The smallest square image larger than ``too_small`` for which no side module is empty."""
    low, high = too_small, 2 * too_small
    while not _fits(module, (channels, high, high)):
        low, high = high, 2 * high
        if high > _LARGEST_SIZE:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(module, (channels, middle, middle)) else (middle, high)
    return high


def _fits(module: fx.GraphModule, input_shape: tuple[int, ...]) -> bool:
    try:
        blocks = find_blocks(module, input_shape)
    except Exception as error:  # whatever the network raises on an image that it cannot take
        if is_out_of_memory(error):
            raise
        return False
    plans = _plans(module, blocks, input_shape)
    return not _is_too_small(module, plans, input_shape)
