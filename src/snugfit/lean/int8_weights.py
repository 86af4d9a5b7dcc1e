"""Frozen weights in 8 bits: each layer converts its weight to floats when it runs, forward and backward, then frees it.

One symmetric scale per output channel: ``weight = codes * scale`` with codes from -127 to 127, so that no value moves
by more than half a scale. The paper counts a byte per frozen weight and does not say how.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from snugfit.errors import ModelError
from snugfit.lean.by_position import Geometry
from snugfit.lean.convolution import (
    LeanConv2d,
    autocast_dtype,
    convolution_gradients,
    no_autocast,
    with_placeholders,
)
from snugfit.lean.saved_tensors import Layout, needs_gradient

_LARGEST = 127


def store_int8(module: nn.Module, names: Iterable[str] | None = None) -> None:
    """Store frozen weights of convolutions (``nn.Conv2d``, lean or not) and linear layers in 8 bits, in place.

    The float weight is freed. In the state dict ``weight_int8`` and ``weight_scale`` replace ``weight``; a state with a
    float ``weight`` still loads and is converted. ``layer.weight`` returns new floats. Biases stay parameters and may
    be trained. Change channels before this call, and copy weights after :func:`restore_float`. Subclasses of torch's
    layers are left unchanged.

    Args:
        module: a network in which trained and frozen layers are settled (``requires_grad``).
        names: layers to store; by default all with a frozen weight.

    Raises:
        ModelError: a named layer's weight is trained, a named layer is of another kind, or there is nothing to store.
    """
    layers = dict(module.named_modules())
    chosen = [name for name, each in layers.items() if _is_frozen(each)] if names is None else list(names)
    for name in chosen:
        _check(name, layers.get(name))
    if not chosen:
        raise ModelError("no convolution or linear layer has a frozen weight to store in 8 bits: freeze layers first.")
    for name in chosen:
        _store(layers[name])


def restore_float(module: nn.Module) -> None:
    """Undo :func:`store_int8`, in place: weights are frozen float parameters again, with the rounded values."""
    for layer in module.modules():
        if isinstance(layer, _Stored):
            weight = layer.weight
            del layer._buffers["weight_int8"], layer._buffers["weight_scale"]
            layer.__class__ = layer.__dict__.pop("_was")
            layer._parameters = {"weight": nn.Parameter(weight, requires_grad=False), **layer._parameters}


class FloatState(Mapping[str, Tensor]):
    """The state dict after :func:`restore_float`; each float weight is computed when it is read.

    So a network that fits only in 8 bits can be written as floats, one tensor at a time.

    Args:
        module: a network with any number of weights in 8 bits.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _Stored)}
        self._stored = {f"{name}.weight" if name else "weight": layer for name, layer in layers.items()}
        codes = {f"{name}{ending}" for name in self._stored for ending in ("_int8", "_scale")}
        self._others = {name: value for name, value in module.state_dict().items() if name not in codes}

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].weight if name in self._stored else self._others[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._stored, *self._others))

    def __len__(self) -> int:
        return len(self._stored) + len(self._others)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (K, ...), int8 and in the weight's memory format, and a scale (K,) for a weight (K, ...)."""
    dims = tuple(range(1, weight.dim()))
    scale = weight.abs().amax(dims) / _LARGEST
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (weight / _column(scale, weight)).round_().clamp_(-_LARGEST, _LARGEST)
    return codes.to(torch.int8), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """Floats (K, ...), in the scale's precision, from codes (K, ...) and their scale (K,)."""
    return codes.to(scale.dtype).mul_(_column(scale, codes))


def _column(scale: Tensor, like: Tensor) -> Tensor:
    return scale.view(-1, *(1,) * (like.dim() - 1))


def _is_frozen(layer: nn.Module) -> bool:
    return type(layer) in _STORED and not layer.weight.requires_grad


def _check(name: str, layer: nn.Module | None) -> None:
    if layer is None or type(layer) not in _STORED:
        raise ModelError(
            f"{name} is not a convolution or linear layer with a float weight and cannot be stored in 8 bits."
        )
    if not _is_frozen(layer):
        raise ModelError(f"the weight of {name} is trained and cannot be stored in 8 bits: freeze it, or leave it out.")


@torch.no_grad()
def _store(layer: nn.Module) -> None:
    weight = layer._parameters.pop("weight")
    assert weight is not None
    codes, scale = quantise(weight)
    layer.__dict__["_was"], layer.__class__ = type(layer), _STORED[type(layer)]
    layer.register_buffer("weight_int8", codes)
    layer.register_buffer("weight_scale", scale)


class _Stored(nn.Module):
    """The common part of layers with weights in 8 bits."""

    weight_int8: Tensor
    weight_scale: Tensor

    @property
    def weight(self) -> Tensor:
        """The weight (K, ...) in floats, computed at every call; it is not trained."""
        return dequantise(self.weight_int8, self.weight_scale)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        weight = state_dict.pop(f"{prefix}weight", None)
        if weight is not None:
            codes, scale = quantise(weight.detach().to(self.weight_scale.dtype))
            state_dict[f"{prefix}weight_int8"], state_dict[f"{prefix}weight_scale"] = codes, scale
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _weight(codes: Tensor, scale: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The weight (K, ...) as floats, in the precision of autocast."""
    return dequantise(codes, scale).to(dtype or scale.dtype)


class _Int8(torch.autograd.Function):
    """A convolution of (B, C, H, W), or without a geometry a linear layer on (..., C), with a weight in 8 bits.

    ``dtype`` is the precision of autocast.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        geometry: Geometry | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.save_for_backward(*((codes, scale) if ctx.needs_input_grad[0] else ()))
        ctx.layout, ctx.geometry, ctx.dtype = Layout.of(inputs), geometry, dtype
        with no_autocast(inputs, dtype):
            weight = _weight(codes, scale, dtype)
            shift = None if bias is None else bias.to(weight.dtype)
            return F.linear(inputs, weight, shift) if geometry is None else F.conv2d(inputs, weight, shift, *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to_inputs = to_bias = None
        if ctx.needs_input_grad[0]:
            codes, scale = ctx.saved_tensors
            weight = _weight(codes, scale, ctx.dtype)
            if ctx.geometry is None:
                to_inputs = gradient @ weight
            else:
                given = with_placeholders(None, weight, (ctx.layout, Layout.of(weight)), ctx.geometry, None)
                to_inputs = convolution_gradients(gradient, *given, ctx.geometry, [True, False, False])[0]
        if ctx.needs_input_grad[3]:
            if ctx.geometry is not None:
                to_bias = gradient.sum((0, 2, 3))
            else:
                to_bias = gradient.flatten(0, -2).sum(0) if gradient.dim() > 1 else gradient
        return to_inputs, None, None, to_bias, None, None


class Int8Conv2d(_Stored, LeanConv2d):  # type: ignore[override]
    """``nn.Conv2d`` with a frozen weight in 8 bits."""

    def forward(self, input: Tensor) -> Tensor:
        """Feature map (B, C, H, W) or (C, H, W) to (B, K, H', W') or (K, H', W')."""
        if not needs_gradient(input, self.bias):
            stock: Tensor = nn.Conv2d._conv_forward(self, input, self.weight, self.bias)
            return stock
        dtype = autocast_dtype(input)
        images, geometry = self._prepared(input, dtype)
        output: Tensor = _Int8.apply(images, self.weight_int8, self.weight_scale, self.bias, geometry, dtype)
        return output.squeeze(0) if input.dim() == 3 else output


class Int8Linear(_Stored, nn.Linear):  # type: ignore[override]
    """``nn.Linear`` with a frozen weight in 8 bits."""

    def forward(self, input: Tensor) -> Tensor:
        """Inputs (..., C) to (..., K)."""
        if not needs_gradient(input, self.bias):
            return F.linear(input, self.weight, self.bias)
        dtype = autocast_dtype(input)
        given = input if dtype is None else input.to(dtype)
        found: Tensor = _Int8.apply(given, self.weight_int8, self.weight_scale, self.bias, None, dtype)
        return found


_STORED: dict[type[nn.Module], type[_Stored]] = {nn.Conv2d: Int8Conv2d, LeanConv2d: Int8Conv2d, nn.Linear: Int8Linear}
