"""Multiply-accumulates of gradients, counted from what autograd runs on the meta device. Nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from snugfit._meta_device import flop_counter

SAMPLES = 2
"""Batch size for counting: in training mode BatchNorm refuses a single value per channel."""

_LAYERS = {F.linear, *(getattr(F, f"conv{kind}{axes}d") for kind in ("", "_transpose") for axes in (1, 2, 3))}


class _FromFirstLayers(TorchFunctionMode):
    """Starts gradients at the outputs of the layers that read only the network's input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _LAYERS and not output.requires_grad:
            return output.requires_grad_().clone()  # a copy, since the next layer may work in place
        return output


def input_gradient_macs(module: nn.Module, input_shape: Sequence[int], *, reach_input: bool = False) -> int:
    """Multiply-accumulates, per sample, of the gradients with respect to the outputs of all layers but the last.

    A layer's input gradient takes as many as its forward pass. The first layers of a network need none, because nothing
    is trained before them. First layers read only the network's input; a residual unit has two if its shortcut is a
    convolution. Gradients of weights do not count. The module maps (B, *input_shape) to one tensor, on any device, and
    is not changed. With ``reach_input`` the gradient of its input, which earlier layers need, counts too.
    """
    inputs = torch.empty((SAMPLES, *input_shape), device="meta", requires_grad=reach_input)
    with _FromFirstLayers():
        output: Tensor = functional_call(module, _on_meta(module, trains=False), inputs.clone())
    if not output.requires_grad:
        return 0
    return _count(lambda: output.sum().backward())


def loss_macs(loss: nn.Module, features_shape: Sequence[int]) -> int:
    """Multiply-accumulates, per sample, of a local loss: forward pass, input gradients, gradients of its own weights.

    Products of matrices and convolutions are counted, elementwise operations are not. The loss maps features
    (SAMPLES, *features_shape) to one value, on any device, and is not changed.
    """
    features = torch.empty((SAMPLES, *features_shape), device="meta", requires_grad=True)
    held = _on_meta(loss, trains=True)
    return _count(lambda: functional_call(loss, held, features.clone()).backward())


def _on_meta(module: nn.Module, *, trains: bool) -> dict[str, Tensor]:
    """Empty copies of a module's parameters and buffers, in their shapes; trained only where the module's are."""
    empty = {name: torch.empty_like(buffer, device="meta") for name, buffer in module.named_buffers()}
    for name, parameter in module.named_parameters():
        empty[name] = torch.empty_like(parameter, device="meta").requires_grad_(trains and parameter.requires_grad)
    return empty


def _count(run: Callable[[], object]) -> int:
    with flop_counter({torch.ops.aten.convolution_backward: _convolution_backward}) as counter:
        run()
    return int(counter.get_total_flops()) // (2 * SAMPLES)


def _convolution_backward(
    gradient: Sequence[int], inputs: Sequence[int], weight: Sequence[int], *arguments: Any, **_: Any
) -> int:
    """Operations of a convolution's backward pass; torch's own formula counts a weight gradient once per group."""
    transposed, output_mask = arguments[4], arguments[7]
    pixels = math.prod((inputs if transposed else gradient)[2:])
    return int(2 * inputs[0] * pixels * math.prod(weight) * sum(output_mask[:2]))
