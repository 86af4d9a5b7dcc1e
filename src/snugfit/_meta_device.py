"""Cached results of operators on the meta device, because torch computes shapes there in Python, 0.2 ms per operator.

A network is analysed many times before it runs once: at several batch sizes, with several strategies. The same
operators meet the same shapes again, in its identical layers, and nothing depends on values there. Outputs of operators
for which torch takes longest, batch norms above all, are made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

MOST = 4096
"""Number of cached results; about 1 kB each."""

_CALL, _FIRST, _NOTHING = object(), object(), object()
"""Must be called; returns its first argument, as in-place operators do; returns None."""
_known: dict[Any, Any] = {}
_aten = torch.ops.aten
_NORMS = (_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
_NORM_BACKWARD = _aten.native_batch_norm_backward.default
_LIKE_MAPS = (_aten.hardtanh_backward.default, _aten.threshold_backward.default)
"""Gradients of activations, from those of their outputs and another feature map."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of feature maps whose statistics are in float32."""


def forget() -> None:
    """Clear the cache."""
    _known.clear()


class CachedOperators(TorchDispatchMode):
    """Takes results of operators on the meta device from the cache."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


@contextmanager
def flop_counter(formulas: Mapping[Any, Callable[..., int]] | None = None) -> Iterator[FlopCounterMode]:
    """Counts operations of matrix products and convolutions on the meta device; ``formulas`` replace torch's."""
    with CachedOperators(), FlopCounterMode(display=False, custom_mapping=dict(formulas or {})) as counter:
        yield counter


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator for ``__torch_dispatch__``; the result is cached if all its tensors are on the meta device."""
    values = _key((args, kwargs))
    if values is None:
        return func(*args, **kwargs)
    key = func, values
    known = _known.get(key)
    if known is None:
        return _call(key, func, args, kwargs)
    if known is _CALL:
        return func(*args, **kwargs)
    if known is _FIRST:
        return args[0]
    if known is _NOTHING:
        return None
    kind, made = known
    return _empty(*made[0]) if kind is Tensor else kind(None if one is None else _empty(*one) for one in made)


def _call(key: Any, func: Any, args: Any, kwargs: Any) -> Any:
    tensors = list(_tensors(args, kwargs))
    before = [_facts(tensor) for tensor in tensors]
    made = (make(func, args, kwargs) for make in (_batch_norm, _activation, _product))
    output = next((one for one in made if one is not None), None)
    if output is None:
        output = func(*args, **kwargs)
    if len(_known) >= MOST:
        forget()
    _known[key] = _CALL
    if before != [_facts(tensor) for tensor in tensors]:
        return output  # it changed more than values
    if output is None:
        _known[key] = _NOTHING
    elif args and output is args[0]:
        _known[key] = _FIRST
    elif isinstance(output, Tensor | tuple | list):
        _remember(key, output, {facts[0] for facts in before})
    return output


def _batch_norm(func: Any, args: Any, kwargs: Any) -> tuple[Tensor | None, ...] | None:
    """Outputs of a batch norm on feature maps (B, C, H, W) or of its backward pass; None for anything else.

    torch computes them with some 30 operators in Python, which take 8 ms.
    """
    if func in _NORMS:
        maps, training, wanted = args[:1], args[5], (True, True)
    elif func is _NORM_BACKWARD:
        maps, training, wanted = args[:2], args[7], args[9][1:]
    else:
        return None
    inputs, weight, running_mean = maps[-1], args[len(maps)], args[3]
    channels = inputs.shape[1:2]
    alike = all(each.shape == inputs.shape and each.stride() == inputs.stride() for each in maps)
    fits = all(each.shape == channels for each in args[len(maps) :] if isinstance(each, Tensor))
    if not (alike and fits and _is_plain(inputs) and (training or running_mean is not None)):
        return None
    dtype = torch.float32 if func in _NORMS else (inputs if weight is None else weight).dtype
    output = _empty(inputs.shape, inputs.stride(), inputs.dtype)
    return output, *(_empty(channels, (1,), dtype) if each else None for each in wanted)


def _activation(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """What ReLU6 changes in place, or an activation's gradient, on feature maps (B, C, H, W); None for anything else.

    torch computes them in Python, which takes 1 to 3 ms.
    """
    if func is _aten.hardtanh_.default:
        return args[0] if _is_plain(args[0]) else None
    if func not in _LIKE_MAPS or not _is_plain(args[0]) or _layout(args[0]) != _layout(args[1]):
        return None
    return _empty(*_layout(args[0]))


def _product(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The matrix (N, M) to which a product is added in place; None for anything else. In torch it takes 0.7 ms."""
    if func is not _aten.addmm_.default or kwargs:
        return None
    total, left, right = args
    fits = left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]
    alike = total.dtype == left.dtype == right.dtype
    return total if fits and alike and total.shape == (left.shape[0], right.shape[1]) else None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _is_plain(maps: Tensor) -> bool:
    """Whether torch keeps the strides of feature maps (B, C, H, W). One value per channel is left to it to refuse."""
    if maps.dim() != 4 or maps.numel() <= maps.shape[1] or maps.dtype not in _FLOATS:
        return False
    return maps.is_contiguous() or maps.is_contiguous(memory_format=torch.channels_last)


def _remember(key: Any, output: Any, storages: set[int]) -> None:
    """Cache outputs that have their own storages, each exactly as large as its tensor."""
    outputs = [output] if isinstance(output, Tensor) else list(output)
    made: list[tuple[Any, ...] | None] = []
    for one in outputs:
        if one is None:
            made.append(None)
            continue
        if type(one) is not Tensor or one.device.type != "meta":
            return
        same, own = _empty(*_layout(one)), one.untyped_storage()
        if own._cdata in storages or one.storage_offset() or same.untyped_storage().nbytes() != own.nbytes():
            return
        storages.add(own._cdata)
        made.append(_layout(one))
    kind = Tensor if isinstance(output, Tensor) else tuple if isinstance(output, tuple) else list
    _known[key] = kind, made


def _empty(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    return (value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor))


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.shape, tensor.stride(), tensor.storage_offset()


def _key(value: Any) -> Any:
    """Everything that outputs depend on, numbers with their types, because 1, 1.0 and True are equal.

    None if a tensor is not on the meta device.
    """
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.storage_offset()) if value.is_meta else None
    if isinstance(value, (list, tuple)):
        keys = tuple(map(_key, value))
        return None if None in keys else keys
    if isinstance(value, dict):
        return _key([each for pair in sorted(value.items()) for each in pair])
    return type(value), value
