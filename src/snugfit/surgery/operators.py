"""What layers and functions do to channels, as far as it is known."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
"""Their own classes alone: a subclass may do anything with its weight."""

BATCHNORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}

_ELEMENTWISE: set[Any] = {
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh,
    nn.Softsign,
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    F.relu, F.relu_, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.hardswish, F.tanh,
    F.softsign, torch.relu, torch.relu_, torch.tanh, torch.clone,
    "relu", "relu_", "tanh", "clone", "contiguous",
}  # fmt: skip
"""What works on every element alone and maps zero to zero, so that channels of zeros stay so. (A sigmoid does not.)"""

POOLS: dict[Any, int] = {
    nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3,
    nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3,
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3,
    nn.AdaptiveMaxPool1d: 1, nn.AdaptiveMaxPool2d: 2, nn.AdaptiveMaxPool3d: 3,
    F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3,
    F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3,
    F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3,
    F.adaptive_max_pool1d: 1, F.adaptive_max_pool2d: 2, F.adaptive_max_pool3d: 3,
}  # fmt: skip
"""Pools, and over how many axes."""

ADDITIONS: set[Any] = {operator.add, operator.iadd, torch.add, "add", "add_"}
MEANS: set[Any] = {torch.mean, "mean"}


def keeps_channels(target: Any) -> bool:
    """Whether a class of layers, a function or the name of a method works on every element alone and keeps zeros."""
    return target in _ELEMENTWISE


def is_depthwise(layer: nn.Module) -> bool:
    """Whether a convolution filters every channel alone, into one channel."""
    return bool(layer.groups == layer.in_channels == layer.out_channels != 1)


def asks_batch_size(node: fx.Node) -> bool:
    """Whether a node is ``x.size(0)``, which no channel takes part in."""
    return node.op == "call_method" and node.target == "size" and bool(node.args[1:] == (0,))


def flattens(node: fx.Node) -> bool:
    """Whether a function or method is sure to map (B, ...) to (B, features) whatever the number of channels.

    A view to a number of features that is written out is not: it fails once channels are removed.
    """
    if node.target in (torch.flatten, "flatten"):
        values = dict(zip(("input", "start_dim", "end_dim"), node.args, strict=False)) | node.kwargs
        return (values.get("start_dim", 0), values.get("end_dim", -1)) == (1, -1)
    if node.target not in (torch.reshape, "view", "reshape"):
        return False
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    return len(sizes) == 2 and isinstance(sizes[0], fx.Node) and asks_batch_size(sizes[0]) and bool(sizes[1] == -1)


def averaged_axes(node: fx.Node, rank: int) -> set[int]:
    """Axes, from 0, that a mean runs over; empty where it names none."""
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())
    if not isinstance(dims, (int, tuple, list)):
        return set()
    return {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims) if isinstance(dim, int)}
