"""Autocast to 16 bits on any device, including the meta device, where torch's autocast has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

META_AS = "cpu"
"""The device whose autocast state applies to tensors on the meta device."""

_LOWERED = frozenset(
    {
        F.linear,
        F.scaled_dot_product_attention,
        *(getattr(F, f"conv{kind}{axes}d") for kind in ("", "_transpose") for axes in (1, 2, 3)),
        *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm")),
        *(getattr(Tensor, name) for name in ("matmul", "mm", "bmm", "__matmul__")),
    }
)
"""Functions that autocast runs in low precision on the processor (torch/csrc/autograd/autocast_mode.cpp)."""
_RAISED = frozenset({F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy})
"""Losses, which it runs in float32."""


def autocast(device: str, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[object]:
    """Compute in ``dtype`` where torch's autocast does, on a device of any kind (``cpu``, ``cuda``, ``meta``)."""
    return _on_meta(dtype) if device == "meta" else torch.autocast(device, dtype=dtype)


def autocast_for_recomputation() -> AbstractContextManager[object]:
    """The autocast context for a recomputation on the meta device; torch restores its own autocast."""
    modes = _get_current_function_mode_stack()
    active = [mode for mode in modes if isinstance(mode, _MetaAutocast)]
    return _MetaAutocast(active[-1].dtype) if active else nullcontext()


@contextmanager
def _on_meta(dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast(META_AS, dtype=dtype), _MetaAutocast(dtype):
        yield


class _MetaAutocast(TorchFunctionMode):
    """Lowers the same arguments as autocast; a lowered weight lives until the context ends, as in torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled(META_AS) and (func in _LOWERED or func in _RAISED):
            change = self._lowered if func in _LOWERED else _raised
            args, kwargs = tree_map_only(Tensor, change, (args, kwargs))
        return func(*args, **kwargs)

    def _lowered(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta or tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(self.dtype)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor, tensor.to(self.dtype)
        return self._weights[id(tensor)][1]


def _raised(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_meta and tensor.dtype in (torch.bfloat16, torch.float16) else tensor
