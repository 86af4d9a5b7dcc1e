"""How known layers and functions treat channels."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
"""Exactly these classes, because a subclass may use its weight in any way."""

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
"""Elementwise operations that map zero to zero, so that zero channels stay zero. (A sigmoid does not.)"""

_POOLS = (
    ("MaxPool", "max_pool"),
    ("AvgPool", "avg_pool"),
    ("AdaptiveAvgPool", "adaptive_avg_pool"),
    ("AdaptiveMaxPool", "adaptive_max_pool"),
)
POOLS: dict[Any, int] = {
    pool: axes
    for layer, function in _POOLS
    for axes in (1, 2, 3)
    for pool in (getattr(nn, f"{layer}{axes}d"), getattr(F, f"{function}{axes}d"))
}
"""Layers and functions that pool, and over how many axes."""

ADDITIONS: set[Any] = {operator.add, operator.iadd, torch.add, "add", "add_"}
MEANS: set[Any] = {torch.mean, "mean"}


def keeps_channels(target: Any) -> bool:
    """Whether a layer class, a function or a method name works elementwise and keeps zeros."""
    return target in _ELEMENTWISE


def is_depthwise(layer: nn.Module) -> bool:
    """Whether a convolution filters every channel separately, into one channel."""
    return bool(layer.groups == layer.in_channels == layer.out_channels != 1)


def asks_batch_size(node: fx.Node) -> bool:
    """Whether a node is ``x.size(0)``, which does not depend on channels."""
    return node.op == "call_method" and node.target == "size" and bool(node.args[1:] == (0,))


def flattens(node: fx.Node) -> bool:
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
    return len(sizes) == 2 and isinstance(sizes[0], fx.Node) and asks_batch_size(sizes[0]) and bool(sizes[1] == -1)


def averaged_axes(node: fx.Node, rank: int) -> set[int]:
    """Axes, from 0, that a mean runs over; empty if it names none."""
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())
    if not isinstance(dims, (int, tuple, list)):
        return set()
    return {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims) if isinstance(dim, int)}
