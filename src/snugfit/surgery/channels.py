"""Channels that can be removed together, found in a network's graph: from the layers that make them to their readers.

Shapes: B batch, C channels, H and W height and width, T tokens, F features.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from snugfit._chain.propagation import Shapes, node_shapes
from snugfit.errors import ModelError, is_out_of_memory

_CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
"""Axes of each class; exactly these classes, because a subclass may use its weight in any way."""
BATCHNORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}
_LAYERS = (
    "Identity Dropout Dropout1d Dropout2d Dropout3d ReLU ReLU6 LeakyReLU ELU CELU SELU GELU SiLU Mish Hardswish Tanh "
    "Softsign"
)
_FUNCTIONS = (
    "dropout dropout1d dropout2d dropout3d relu relu_ relu6 leaky_relu elu celu selu gelu silu mish hardswish tanh "
    "softsign"
)
ELEMENTWISE: set[Any] = {
    *(getattr(nn, name) for name in _LAYERS.split()),
    *(getattr(F, name) for name in _FUNCTIONS.split()),
    *(torch.relu, torch.relu_, torch.tanh, torch.clone),
    *("relu", "relu_", "tanh", "clone", "contiguous"),
}
"""Elementwise layers, functions and methods that map zero to zero, so that zero channels stay zero."""
_POOLS: dict[Any, int] = {
    getattr(module, f"{name}{axes}d"): axes
    for axes in (1, 2, 3)
    for module, names in (
        (nn, ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool")),
        (F, ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")),
    )
    for name in names
}
"""Layers and functions that pool, and over how many axes."""
_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
_MEANS = (torch.mean, "mean")


@dataclass(frozen=True)
class Slot:
    """Where the channels of a group lie in one tensor.

    Attributes:
        tensor: state-dict name of a parameter or buffer.
        dim: its dimension that runs over the channels.
        block: consecutive indices per channel: more than 1 where a linear layer reads flattened feature maps (H * W).
    """

    tensor: str
    dim: int
    block: int = 1


def by_channel(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """View of a tensor of any shape with dimension ``slot.dim`` as channels and the next one as a channel's block."""
    size = tensor.shape
    return tensor.view(*size[: slot.dim], -1, slot.block, *size[slot.dim + 1 :])


def channel_norms(tensor: torch.Tensor, slot: Slot, order: float = 2) -> torch.Tensor:
    """Norm of every channel's part of a tensor, shape (channels,): Euclidean, or the largest absolute value (infinity).

    It makes no copy of the tensor and no autograd graph.
    """
    blocks = by_channel(tensor.detach(), slot)
    others = [dim for dim in range(blocks.dim()) if dim != slot.dim]
    norms: torch.Tensor = torch.linalg.vector_norm(blocks, ord=order, dim=others)
    return norms


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that lie in several tensors and can only be removed from all of them.

    It holds names and no sizes, so that it stays valid after the network is reshaped.

    Attributes:
        name: the layer that makes the channels; the first one where several are added.
        producers: weights and biases that make them: convolution or linear layer (dim 0), BatchNorm, depthwise.
        readers: weights of the convolutions and linear layers that read them (dim 1).
        statistics: running mean and variance of each channel.
    """

    name: str
    producers: tuple[Slot, ...]
    readers: tuple[Slot, ...]
    statistics: tuple[Slot, ...] = ()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots that a channel is removed from."""
        return (*self.producers, *self.readers, *self.statistics)


def width(module: nn.Module, group: ChannelGroup) -> int:
    """Current number of channels of a group."""
    slot = group.producers[0]
    return int(operator.attrgetter(slot.tensor)(module).shape[slot.dim]) // slot.block


def find_groups(module: fx.GraphModule, input_shape: tuple[int, ...]) -> list[ChannelGroup]:
    """Find the groups of channels of a network, in order of execution, without allocating or changing anything.

    Channels are followed from a convolution or linear layer through BatchNorm, depthwise convolutions, activations that
    map zero to zero, pools, dropouts and flattening to their readers; layers whose outputs are added form one
    group (PruneTrain section 4: channel union). Channels of the network's input and output belong to no group, nor do
    those that reach anything else: concatenation, other reshapes, slicing, products, attention, LayerNorm, grouped
    convolutions, custom layers, layers that are called twice or share weights.

    Args:
        module: a traced network, such as ``Chain.to_module()`` or ``torch.fx.symbolic_trace(model)``; may be on meta.
        input_shape: shape of one sample, without the batch axis.

    Raises:
        ModelError: the network does not run on such an input.
    """
    try:
        shapes = node_shapes(module, input_shape)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"channels cannot be followed: the network fails on shape {input_shape}: {error}") from error
    walk = _Walk(module, shapes)
    for node in module.graph.nodes:
        walk.visit(node)
    return walk.groups()


@dataclass
class _Channels:
    """Channels of a group under construction: a node of a disjoint-set forest, whose root holds the slots."""

    name: str
    order: int
    producers: list[Slot] = field(default_factory=list)
    readers: list[Slot] = field(default_factory=list)
    statistics: list[Slot] = field(default_factory=list)
    fixed: bool = False
    parent: _Channels | None = None

    def root(self) -> _Channels:
        return self if self.parent is None else self.parent.root()

    def join(self, other: _Channels) -> None:
        mine, theirs = sorted((self.root(), other.root()), key=lambda channels: channels.order)
        if mine is theirs:
            return
        mine.producers += theirs.producers
        mine.readers += theirs.readers
        mine.statistics += theirs.statistics
        mine.fixed |= theirs.fixed
        theirs.parent = mine


@dataclass(frozen=True)
class _Flow:
    """The channels of a value: along one axis, ``block`` consecutive features each."""

    channels: _Channels
    axis: int
    block: int = 1


class _Walk:
    """One pass over the graph; each value has a known flow of channels or None."""

    def __init__(self, module: fx.GraphModule, shapes: Shapes) -> None:
        self.module, self.shapes = module, shapes
        self.flows: dict[fx.Node, _Flow | None] = {}
        self.made: list[_Channels] = []
        self.shared = _shared_parameters(module)
        self.rules: dict[Any, Callable[[fx.Node], _Flow | None]] = {
            **dict.fromkeys(_CONVOLUTIONS, self._convolution),
            nn.Linear: self._linear,
            **dict.fromkeys(BATCHNORMS, self._batchnorm),
            **dict.fromkeys(ELEMENTWISE, self._same),
            **dict.fromkeys(_POOLS, self._pool),
            **dict.fromkeys(_ADDITIONS, self._add),
            **dict.fromkeys(_MEANS, self._mean),
        }

    def groups(self) -> list[ChannelGroup]:
        return [
            ChannelGroup(made.name, tuple(made.producers), tuple(made.readers), tuple(made.statistics))
            for made in self.made
            if made.parent is None and not made.fixed and made.readers
        ]

    def visit(self, node: fx.Node) -> None:
        rule = self._rule(node)
        self.flows[node] = flow = rule(node) if rule and self.shapes.get(node) else None
        if flow is None and not _asks_batch_size(node):
            for read in map(self.flows.get, node.all_input_nodes):
                if read is not None:
                    read.channels.root().fixed = True

    def _rule(self, node: fx.Node) -> Callable[[fx.Node], _Flow | None] | None:
        if node.op == "call_module":
            layer = self._layer(node)
            if any(id(parameter) in self.shared for parameter in layer.parameters()):
                return None
            if isinstance(layer, nn.Flatten):
                return self._flatten if (layer.start_dim, layer.end_dim) == (1, -1) else None
            return self.rules.get(type(layer))
        if node.op in ("call_function", "call_method"):
            return self._flatten if _flattens(node) else self.rules.get(node.target)
        return None

    def _layer(self, node: fx.Node) -> nn.Module:
        return self.module.get_submodule(str(node.target))

    def _source(self, node: fx.Node) -> tuple[_Flow | None, tuple[int, ...]]:
        """Flow and shape of a node's single input."""
        source = node.all_input_nodes[0]
        return self.flows[source], self.shapes[source] or ()

    def _start(self, node: fx.Node, axis: int) -> _Flow:
        """Read the channels of a convolution's or linear layer's input along an axis; the flow of those it makes."""
        flow, _ = self._source(node)
        if flow is not None and flow.axis == axis:
            flow.channels.root().readers.append(Slot(f"{node.target}.weight", 1, flow.block))
        elif flow is not None:
            flow.channels.root().fixed = True
        self.made.append(_Channels(str(node.target), len(self.made), self._slots(node, ("weight", "bias"))))
        return _Flow(self.made[-1], axis)

    def _slots(self, node: fx.Node, names: Iterable[str], block: int = 1) -> list[Slot]:
        layer = self._layer(node)
        return [Slot(f"{node.target}.{name}", 0, block) for name in names if getattr(layer, name) is not None]

    def _convolution(self, node: fx.Node) -> _Flow | None:
        layer, (flow, shape) = self._layer(node), self._source(node)
        if "weight" not in layer._parameters:
            return None
        if is_depthwise(layer):
            if flow is None or flow.axis != 1 or flow.block != 1:
                return None
            flow.channels.root().producers += self._slots(node, ("weight", "bias"))
            return flow
        return self._start(node, 1) if layer.groups == 1 and len(shape) == _CONVOLUTIONS[type(layer)] + 2 else None

    def _linear(self, node: fx.Node) -> _Flow | None:
        return self._start(node, len(self._source(node)[1]) - 1) if "weight" in self._layer(node)._parameters else None

    def _batchnorm(self, node: fx.Node) -> _Flow | None:
        flow, _ = self._source(node)
        if flow is None or flow.axis != 1 or not self._layer(node).affine:
            return None
        channels = flow.channels.root()
        channels.producers += self._slots(node, ("weight", "bias"), flow.block)
        channels.statistics += self._slots(node, ("running_mean", "running_var"), flow.block)
        return flow

    def _same(self, node: fx.Node) -> _Flow | None:
        """The flow is unchanged."""
        inputs = node.all_input_nodes
        return self.flows[inputs[0]] if len(inputs) == 1 else None

    def _pool(self, node: fx.Node) -> _Flow | None:
        """The flow is unchanged if the input is (B, C, and as many axes as are pooled) with its channels along C."""
        (flow, shape), kind = self._source(node), type(self._layer(node)) if node.op == "call_module" else node.target
        is_map = flow is not None and flow.axis == 1 and len(shape) == _POOLS[kind] + 2
        return self._same(node) if is_map else None

    def _add(self, node: fx.Node) -> _Flow | None:
        inputs = node.all_input_nodes
        first, *others = (self.flows[value] for value in inputs)
        if not others or first is None or len({self.shapes[value] for value in inputs}) != 1:
            return None
        for other in others:
            if other is None or (other.axis, other.block) != (first.axis, first.block):
                return None
            first.channels.join(other.channels)
        return first

    def _flatten(self, node: fx.Node) -> _Flow | None:
        """(B, C, H, W) to (B, C * H * W): the features of a channel follow each other."""
        flow, shape = self._source(node)
        if flow is None or flow.axis != 1:
            return None
        return _Flow(flow.channels, 1, flow.block * int(torch.Size(shape[2:]).numel()))

    def _mean(self, node: fx.Node) -> _Flow | None:
        """An average over axes behind the channels, such as (B, C, H, W) to (B, C)."""
        flow, shape = self._source(node)
        axes = _averaged_axes(node, len(shape))
        return flow if flow is not None and flow.axis == 1 and axes and min(axes) > 1 else None


def _shared_parameters(module: fx.GraphModule) -> set[int]:
    """Parameters that the graph uses more than once: layers called twice, or weights in two layers."""
    uses: Counter[int] = Counter()
    for node in module.graph.nodes:
        if node.op == "call_module":
            uses.update(id(parameter) for parameter in module.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr":
            uses[id(operator.attrgetter(node.target)(module))] += 1
    return {parameter for parameter, count in uses.items() if count > 1}


def is_depthwise(layer: nn.Module) -> bool:
    """Whether a convolution filters every channel separately, into one channel."""
    return bool(layer.groups == layer.in_channels == layer.out_channels != 1)


def _asks_batch_size(node: fx.Node) -> bool:
    """Whether a node is ``x.size(0)``, which does not depend on channels."""
    return node.op == "call_method" and node.target == "size" and bool(node.args[1:] == (0,))


def _flattens(node: fx.Node) -> bool:
    """Whether a function or method maps (B, ...) to (B, features) for any number of channels.

    A view with an explicit number of features does not: it fails once channels are removed.
    """
    if node.target in (torch.flatten, "flatten"):
        values = dict(zip(("input", "start_dim", "end_dim"), node.args, strict=False)) | node.kwargs
        return (values.get("start_dim", 0), values.get("end_dim", -1)) == (1, -1)
    if node.target not in (torch.reshape, "view", "reshape"):
        return False
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    return len(sizes) == 2 and isinstance(sizes[0], fx.Node) and _asks_batch_size(sizes[0]) and bool(sizes[1] == -1)


def _averaged_axes(node: fx.Node, rank: int) -> set[int]:
    """Axes, from 0, that a mean runs over; empty if it names none."""
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())
    if not isinstance(dims, (int, tuple, list)):
        return set()
    return {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims) if isinstance(dim, int)}
