"""The leading operators of a traced network that can be tiled: its graph as geometry and functions."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from snugfit._chain.propagation import node_shapes
from snugfit._chain.subgraph import input_node
from snugfit.errors import ModelError
from snugfit.lean import LeanConv2d
from snugfit.tiling import adjoint
from snugfit.tiling.geometry import Window
from snugfit.tiling.layers import Layer, Layers, MapSize
from snugfit.tiling.operators import Operator, TileablePrefix

_CONVOLUTIONS = (nn.Conv2d, LeanConv2d)
_SMOOTH = (nn.SiLU, nn.GELU, nn.ELU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Mish)
_PIXELWISE = (nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, *_SMOOTH)
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_RELUS = (F.relu, torch.relu)
_SIGMOIDS = (F.sigmoid, torch.sigmoid, torch.tanh, F.hardsigmoid, F.hardswish)
_FUNCTIONS = (*_RELUS, *_SIGMOIDS, F.relu6, F.leaky_relu, F.silu, F.gelu, F.elu, F.softplus, F.mish)


def find_tileable_prefix(module: fx.GraphModule, input_shape: tuple[int, ...]) -> TileablePrefix:
    """The leading operators that can be tiled, up to the last point that a single feature map crosses.

    Convolutions with zero padding, max and average pooling, BatchNorm, activations and additions can be tiled. Dropout,
    pooling to a given size and everything that reads the whole feature map cannot, and ends the prefix.

    Args:
        module: a traced network with one input, such as ``Chain.to_module()``.
        input_shape: channels, height, width of one image.

    Raises:
        ModelError: not even the first operator can be tiled.
    """
    shapes = node_shapes(module, input_shape)
    entry = input_node(module.graph)
    numbers, found, nodes = {entry: 0}, list[Operator](), list[fx.Node]()
    maps = [MapSize(*input_shape)]
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        made, shape = _operator(module, node, numbers, shapes), shapes.get(node)
        if made is None or shape is None or len(shape) != 4:
            break
        found.append(made)
        nodes.append(node)
        maps.append(MapSize(*shape[1:]))
        numbers[node] = len(found)
    layers = Layers(tuple(maps), tuple(each.layer for each in found))
    prefix = TileablePrefix(layers, tuple(found), tuple(nodes))
    ends = [cut for cut in layers.cuts[1:] if _leaves_by_one(nodes[:cut])]
    if not ends:
        raise ModelError(
            "no leading part of the model can be cut into tiles: it must begin with convolutions or pools."
        )
    return prefix.cropped(ends[-1])


def _leaves_by_one(nodes: Sequence[fx.Node]) -> bool:
    """Whether only the last node's value is read outside these nodes."""
    inside = set(nodes)
    return all(user in inside for node in nodes[:-1] for user in node.users)


def _operator(
    module: fx.GraphModule, node: fx.Node, numbers: Mapping[fx.Node, int], shapes: Mapping[fx.Node, Any]
) -> Operator | None:
    """The operator of a node, or None where it cannot be tiled."""
    sources = node.all_input_nodes
    if not sources or any(source not in numbers for source in sources):
        return None
    reads = tuple(numbers[source] for source in sources)
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return _of_module(str(node.target), layer, reads, (shapes[sources[0]], shapes.get(node)))
    if node.op == "call_function" and node.target in _ADDITIONS:
        two = len(node.args) == 2 and len(sources) == 2 and not node.kwargs
        same = two and shapes[sources[0]] == shapes[sources[1]]
        return Operator(Layer(node.name, reads), torch.add, adjoint.AddAdjoint(torch.add)) if same else None
    if len(sources) == 1 and (shortcut := _shortcut(node, reads)) is not None:
        return shortcut
    if node.op == "call_function" and node.target in _FUNCTIONS and len(sources) == 1:
        options = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        names = [value for value in (*node.args[1:], *options.values()) if isinstance(value, fx.Node)]
        call = partial(_with_rest, node.target, node.args[1:], options)
        back = adjoint.relu() if node.target in _RELUS else adjoint.Adjoint(call)
        return None if names else Operator(Layer(node.name, reads), call, back)
    return None


def _shortcut(node: fx.Node, reads: tuple[int, ...]) -> Operator | None:
    """Subsampling or appended zero channels: shortcuts of residual networks without weights."""
    rest: tuple[Any, ...] = node.args[1:]
    if node.target is operator.getitem and isinstance(rest[0], tuple) and len(rest[0]) == 4:
        batch, channels, rows, columns = rest[0]
        steps = tuple(each.step if isinstance(each, slice) else None for each in (rows, columns))
        if (batch, channels, rows, columns) != (slice(None), slice(None), *(slice(None, None, s) for s in steps)):
            return None
        windows = [Window(stride=step or 1) for step in steps]

        def every(x: Tensor) -> Tensor:
            return x[..., :: windows[0].stride, :: windows[1].stride]

        return Operator(Layer(node.name, reads, windows[0], windows[1]), every, adjoint.LinearAdjoint(every))
    if node.target is F.pad and isinstance(rest[0], tuple) and len(rest[0]) == 6 and not any(rest[0][:4]):
        widened = partial(_with_rest, F.pad, rest, dict(node.kwargs))
        return Operator(Layer(node.name, reads), widened, adjoint.LinearAdjoint(widened))
    return None


def _with_rest(function: Callable[..., Tensor], rest: tuple[Any, ...], options: dict[str, Any], x: Tensor) -> Tensor:
    return function(x, *rest, **options)


def _of_module(name: str, layer: nn.Module, reads: tuple[int, ...], shapes: tuple[Any, Any]) -> Operator | None:
    if type(layer) in (nn.MaxPool2d, nn.AvgPool2d):
        return _pool(name, layer, reads, shapes)
    if isinstance(layer, nn.Conv2d) and type(layer) in _CONVOLUTIONS and layer.padding_mode == "zeros":
        return _convolution(name, layer, reads)
    if isinstance(layer, nn.BatchNorm2d):
        sums = layer.num_features if adjoint.normalises_by_batch(layer) else 0
        return Operator(Layer(name, reads, sums=sums), layer, adjoint.BatchNormAdjoint(layer), module=layer)
    if isinstance(layer, _PIXELWISE):
        quiet = _keeping_input(layer)
        back = adjoint.activation(layer) or adjoint.Adjoint(quiet.forward)
        return Operator(Layer(name, reads), quiet, back, _overwriting(layer), module=layer)
    return None


def _pool(name: str, layer: Any, reads: tuple[int, ...], shapes: tuple[Any, Any]) -> Operator | None:
    """A pool, with more padding where its last windows reach beyond it; None if its divisors differ at the border."""
    maximum = type(layer) is nn.MaxPool2d
    uneven = not maximum and any(_pair(layer.padding)) and not layer.count_include_pad
    if uneven or (maximum and layer.return_indices) or shapes[1] is None:
        return None
    windows = _windows(layer.kernel_size, layer.stride, layer.padding, layer.dilation if maximum else 1)
    rows, columns = (_reaching(*each) for each in zip(windows, shapes[0][2:], shapes[1][2:], strict=True))
    if not maximum and (rows, columns) != windows:
        return None
    options = {"dilation": layer.dilation} if maximum else {"divisor_override": layer.divisor_override}
    function = F.max_pool2d if maximum else F.avg_pool2d
    call = partial(_pooled, function, layer.kernel_size, layer.stride, options)
    fill = -torch.inf if maximum else 0.0
    back = adjoint.Adjoint(call, fill, owns_memory=True) if maximum else adjoint.LinearAdjoint(call)
    return Operator(Layer(name, reads, rows, columns), call, back, None, fill, layer)


def _reaching(window: Window, read: int, made: int) -> Window:
    """A window with the padding at the end that ``made`` output rows of ``read`` input rows need."""
    return replace(window, after=max(window.after, (made - 1) * window.stride + window.reach - window.before - read))


def _keeping_input(layer: nn.Module) -> nn.Module:
    """The same activation without ``inplace``: its input may be a part of a feature map that others read."""
    if not getattr(layer, "inplace", False):
        return layer
    quiet = copy.copy(layer)
    vars(quiet)["inplace"] = False
    return quiet


def _overwriting(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The in-place version, on (B, C, h, w), of an activation whose slope follows from its output; None for others."""
    if type(layer) is nn.LeakyReLU and layer.negative_slope > 0:
        return partial(F.leaky_relu_, negative_slope=layer.negative_slope)
    known: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
        nn.ReLU: F.relu_,
        nn.ReLU6: partial(F.hardtanh_, min_val=0.0, max_val=6.0),
    }
    return known.get(type(layer))


def _pooled(
    function: Callable[..., Tensor], kernel: Any, stride: Any, options: dict[str, Any], padded: Tensor
) -> Tensor:
    return function(padded, kernel, stride, 0, **options)


def _convolution(name: str, layer: nn.Conv2d, reads: tuple[int, ...]) -> Operator:
    rows, columns = _windows(layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    taps = rows.kernel * columns.kernel * layer.in_channels // layer.groups
    weights = sum(parameter.numel() for parameter in layer.parameters())
    geometry = Layer(name, reads, rows, columns, macs=taps * layer.out_channels, weights=weights)

    def call(padded: Tensor) -> Tensor:
        return F.conv2d(padded, layer.weight, layer.bias, layer.stride, 0, layer.dilation, layer.groups)

    return Operator(geometry, call, adjoint.ConvAdjoint(layer), module=layer)


def _windows(kernel: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Window, Window]:
    """Windows of rows and columns from a layer's settings; padding may be a string, as in ``nn.Conv2d``."""
    kernels, dilations = _pair(kernel), _pair(dilation)
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [each * (size - 1) for each, size in zip(dilations, kernels, strict=True)]
        around = [(each // 2, each - each // 2) for each in total]
    else:
        around = [(each, each) for each in _pair(padding)]
    strides = _pair(kernel if stride is None else stride)
    rows, columns = (Window(kernels[i], strides[i], *around[i], dilations[i]) for i in (0, 1))
    return rows, columns


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)
