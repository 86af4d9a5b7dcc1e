"""Records of layers by the rule of TinyTL, Rep-Net and Yoosefi et al.: one image, forward pass alone.

A convolution or linear layer needs its input and its output (a convolution's divided by its groups), BatchNorm and an
activation their input; inside a residual block the block's input is added. Layers keep their input if their weight is
trained; a ReLU keeps one bit per element, and a smooth activation its whole input.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from snugfit._chain.propagation import Shapes, node_shapes
from snugfit.memory.activation import LayerRecord
from snugfit.profiling.block_members import Members

FLOAT_BYTES, FROZEN_BYTES = 4, 1
"""Bytes of an activation or a trained weight, and of a frozen weight."""

_CLIPPED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU)
_SMOOTH = (nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.ELU, nn.Softplus)
_CLIPPED_CALLS = (F.relu, F.relu6, F.leaky_relu, torch.relu, torch.relu_, "relu", "relu_")
_SMOOTH_CALLS = (
    F.gelu,
    F.silu,
    F.mish,
    F.hardswish,
    F.hardsigmoid,
    F.elu,
    F.softplus,
    torch.sigmoid,
    torch.tanh,
    "sigmoid",
    "tanh",
)


def analytic_records(
    module: fx.GraphModule, input_shape: tuple[int, ...], trains: Set[str], members: Members, *, side_first: bool
) -> list[LayerRecord]:
    """Records of all layers, bytes per image.

    Args:
        module: a traced network.
        input_shape: channels, height, width of one image.
        trains: names of the trained parameters.
        members: its blocks.
        side_first: whether a side module runs before its block, as in Rep-Net's code; else after it, which gives the
            5.72 MB of Yoosefi et al.
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


def analytic_parameter_bytes(module: nn.Module, trains: Set[str]) -> int:
    """Bytes of all parameters: 4 each if trained, 1 if frozen; without gradients and optimizer state."""
    return sum(
        parameter.numel() * (FLOAT_BYTES if name in trains else FROZEN_BYTES)
        for name, parameter in module.named_parameters()
    )


@dataclass(frozen=True)
class _Layer:
    """Memory of one operator.

    Attributes:
        temporary: while it runs.
        kept: because its weight is trained.
        mask: because a gradient passes through an activation.
        trained: whether any of its parameters is trained.
        counts: whether the rule covers it; others (pooling, sums, resizing) count nothing.
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


def _order(module: fx.GraphModule, members: Members, *, side_first: bool) -> list[fx.Node]:
    """Operators by block, a side module's before or after the others of its block."""

    def place(node: fx.Node) -> tuple[int, bool]:
        return members.block[node], (node in members.side) != side_first

    return sorted((node for node in module.graph.nodes if node in members.block), key=place)
