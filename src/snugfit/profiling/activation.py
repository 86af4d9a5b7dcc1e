"""Activation memory of any traced network, block by block, by the paper's rule."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from itertools import chain

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from snugfit._chain import find_blocks
from snugfit._chain.blocks import is_side
from snugfit._chain.propagation import Shapes, node_shapes
from snugfit.memory.activation import ActivationMemory, LayerRecord, add_up

FLOAT_BYTES, FROZEN_BYTES = 4, 1
"""Bytes of an activation or a trained weight, and of a frozen weight."""

_CLIPPED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU)
_SMOOTH = (nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.ELU, nn.Softplus)
_CLIPPED_CALLS = (F.relu, F.relu6, F.leaky_relu, torch.relu, torch.relu_, "relu", "relu_")
_SMOOTH_CALLS = (
    *(F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.elu, F.softplus),
    *(torch.sigmoid, torch.tanh, "sigmoid", "tanh"),
)


@dataclass(frozen=True)
class Resident:
    """Bytes in use during the whole step: weights and buffers, and the optimizer's state."""

    weights: int
    optimizer: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.weights + self.optimizer


@dataclass(frozen=True)
class _Members:
    """Operators and their blocks.

    Attributes:
        names: of the blocks.
        block: number of the block of every operator.
        side: those operators that belong to a side module.
        entries: for each block, the operator whose output enters it, or the network's input.
        residual: numbers of the blocks whose input is read in more than one place, not counting its side module.
    """

    names: tuple[str, ...]
    block: dict[fx.Node, int]
    side: frozenset[fx.Node]
    entries: tuple[fx.Node, ...]
    residual: frozenset[int]

    @classmethod
    def of(cls, module: fx.GraphModule, input_shape: tuple[int, ...]) -> _Members:
        """Those of a traced network, with or without a side network; blocks are numbered as by ``find_blocks``."""
        blocks = find_blocks(module, input_shape)
        block = {node: number for number, part in enumerate(blocks) for node in part.nodes}
        side = frozenset(node for node in block if is_side(node))
        return cls(
            names=tuple(part.name for part in blocks),
            block=block,
            side=side,
            entries=tuple(part.entry for part in blocks),
            residual=frozenset(
                number
                for number, part in enumerate(blocks)
                if len(part.entry.users.keys() & (set(part.nodes) - side)) > 1
            ),
        )


def analytic_activation_memory(
    module: fx.GraphModule, input_shape: tuple[int, ...], trains: Set[str], *, batch: int = 1, side_first: bool = False
) -> ActivationMemory:
    """Activation memory by the paper's rule (Yoosefi et al., equations 1 to 6): bytes of blocks are per image.

    Args:
        module: a traced network, with or without a side network; may be on meta.
        input_shape: channels, height, width of one image.
        trains: names of the trained parameters.
        batch: images of a step.
        side_first: whether a side module runs before its block, as in Rep-Net's code; else after it, which gives the
            paper's figure.
    """
    members = _Members.of(module, input_shape)
    records = _analytic_records(module, input_shape, trains, members, side_first=side_first)
    parameters = sum(p.numel() * (FLOAT_BYTES if n in trains else FROZEN_BYTES) for n, p in module.named_parameters())
    return add_up(members.names, records, parameter_bytes=parameters, batch=batch)


def resident_bytes(module: nn.Module, trains: Set[str], *, state_copies: float, int8: bool = False) -> Resident:
    """Memory of a network's weights during the whole step.

    Args:
        module: may be on meta.
        trains: names of the trained parameters.
        state_copies: bytes of optimizer state per byte of trained weights: 2 for Adam.
        int8: whether frozen weights of convolutions and linear layers are stored as int8.
    """
    weights = trained = 0
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if name in trains:
            trained += tensor.nbytes
        coded = int8 and tensor.dim() > 1 and tensor.is_floating_point() and name not in trains
        weights += _int8_bytes(tensor) if coded else tensor.nbytes
    return Resident(weights, math.ceil(state_copies * trained))


def _int8_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight (K, ...) in 8 bits: one per value, and one float per output channel."""
    return weight.numel() + weight.shape[0] * weight.element_size()


def _analytic_records(
    module: fx.GraphModule, input_shape: tuple[int, ...], trains: Set[str], members: _Members, *, side_first: bool
) -> list[LayerRecord]:
    """Records of all layers by the rule of TinyTL, Rep-Net and Yoosefi et al.: one image, forward pass alone.

    A convolution or linear layer needs its input and its output (a convolution's divided by its groups), BatchNorm and
    an activation their input; inside a residual block the block's input is added. Layers keep their input if their
    weight is trained; a ReLU keeps one bit per element, and a smooth activation its whole input.
    """
    shapes = node_shapes(module, input_shape)
    order = _order(module, members, side_first=side_first)
    layers = [(node, _Layer.of(module, node, shapes, trains)) for node in order]
    first = next((index for index, (_, layer) in enumerate(layers) if layer.trained), len(layers))
    passed = any(layer.mask for _, layer in layers[first:])
    records = []
    for node, layer in layers:
        block = members.block[node]
        residual = block in members.residual and node not in members.side and layer.counts
        held = _floats(shapes, members.entries[block]) if residual else 0
        kept = layer.kept + (layer.mask if passed else 0)
        records.append(LayerRecord(str(node.target), block, layer.temporary + held, kept))
    return records


@dataclass(frozen=True)
class _Layer:
    """Memory of one operator: while it runs, kept because its weight is trained, and because a gradient passes.

    ``counts`` says whether the rule covers it; others (pooling, sums, resizing) count nothing.
    """

    temporary: int = 0
    kept: int = 0
    mask: int = 0
    trained: bool = False
    counts: bool = False

    @classmethod
    def of(cls, module: fx.GraphModule, node: fx.Node, shapes: Shapes, trains: Set[str]) -> _Layer:
        layer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        inputs = _floats(shapes, node.all_input_nodes[0]) if node.all_input_nodes else 0
        if layer is None:
            return cls._activation(inputs, node.target in _CLIPPED_CALLS, node.target in _SMOOTH_CALLS)
        own = {name for name, _ in layer.named_parameters()}
        trained = any(f"{node.target}.{name}" in trains for name in own)
        kept = inputs if f"{node.target}.weight" in trains else 0
        if isinstance(layer, (_ConvNd, nn.Linear)):
            outputs = _floats(shapes, node) // (layer.groups if isinstance(layer, _ConvNd) else 1)
            return cls(inputs + outputs, kept, trained=trained, counts=True)
        if isinstance(layer, _BatchNorm):
            return cls(inputs, kept, trained=trained, counts=True)
        return cls._activation(inputs, isinstance(layer, _CLIPPED), isinstance(layer, _SMOOTH), trained=trained)

    @classmethod
    def _activation(cls, inputs: int, clipped: bool, smooth: bool, *, trained: bool = False) -> _Layer:
        if not clipped and not smooth:
            return cls(trained=trained)
        return cls(inputs, mask=inputs // (8 * FLOAT_BYTES) if clipped else inputs, trained=trained, counts=True)


def _floats(shapes: Shapes, node: fx.Node) -> int:
    shape = shapes[node]
    return 0 if shape is None else FLOAT_BYTES * math.prod(shape[1:])


def _order(module: fx.GraphModule, members: _Members, *, side_first: bool) -> list[fx.Node]:
    """Operators by block, a side module's before or after the others of its block."""

    def place(node: fx.Node) -> tuple[int, bool]:
        return members.block[node], (node in members.side) != side_first

    return sorted((node for node in module.graph.nodes if node in members.block), key=place)
