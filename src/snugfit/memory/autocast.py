"""Autocast to bfloat16 on any device, the meta device included, which torch's autocast leaves in float32."""

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
"""The device whose autocast state holds for tensors on the meta device."""

_LOWERED = frozenset(
    {
        F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
        torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.addbmm, torch.baddbmm,
        Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__, F.scaled_dot_product_attention,
    }
)  # fmt: skip
"""What autocast computes in low precision on the processor (torch/csrc/autograd/autocast_mode.cpp)."""
_RAISED = frozenset({F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy})
"""Losses, which it computes in float32."""


def autocast(device: str, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[object]:
    """Compute in ``dtype`` where torch's autocast does, on a device of any kind (``cpu``, ``cuda``, ``meta``)."""
    return _on_meta(dtype) if device == "meta" else torch.autocast(device, dtype=dtype)


def autocast_again() -> AbstractContextManager[object]:
    """What a recomputation of the present computation must run in, beside torch's autocast, which torch restores."""
    modes = _get_current_function_mode_stack()
    active = [mode for mode in modes if isinstance(mode, _MetaAutocast)]
    return _MetaAutocast(active[-1].dtype) if active else nullcontext()


@contextmanager
def _on_meta(dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast(META_AS, dtype=dtype), _MetaAutocast(dtype):
        yield


class _MetaAutocast(TorchFunctionMode):
    """Lowers what autocast would lower; a lowered weight lives until the context ends, as there."""

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
    return tensor.float() if tensor.is_meta and tensor.dtype == torch.bfloat16 else tensor
