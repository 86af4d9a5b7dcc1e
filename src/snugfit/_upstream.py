"""Workarounds for defects of torch; docs/upstream.md describes each."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

GROUP_NORM_MENDED = "2.14"
"""The first torch whose GroupNorm does not crash; 2.11.0, 2.12.1 and 2.13.0 do."""
PADDED_CHANNELS, WIDEST_DEPTHWISE = 16 * 16, 3
"""See :func:`depthwise_workspace`."""
_HOOK_KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
_GROUP_NORM_BACKWARD = torch.ops.aten.native_group_norm_backward


def _forget_source_lines() -> None:
    """Free the lines of torch's source files that it read while it was imported; ``linecache`` reads them on demand."""
    folder = str(Path(torch.__file__).parent)
    for file in [each for each in linecache.cache if each.startswith(folder)]:
        linecache.cache.pop(file, None)


_forget_source_lines()  # before other modules are imported, which take the 1.8 MiB


@cache
def fix_group_norm() -> None:
    """Keep torch's GroupNorm from writing the gradient of its input through a null pointer.

    On the processor the backward pass of GroupNorm on a feature map in channels_last ends the process by a segmentation
    fault if the input needs no gradient: in the first layer, behind frozen layers, or in a block trained alone. With
    this call that gradient is computed and discarded. All other gradients stay the same, bit for bit.
    """
    if torch.__version__ >= GROUP_NORM_MENDED:
        return
    stock = torch.library.get_kernel(_GROUP_NORM_BACKWARD.default, "CPU")

    def mended(keys: Any, *args: Any) -> tuple[Tensor | None, ...]:
        *given, wanted = args
        if wanted[0] or not crashes(given[1], wanted):
            return tuple(stock.call_boxed(keys, *args))
        return None, *stock.call_boxed(keys, *given, [True, *wanted[1:]])[1:]

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        library.impl(_GROUP_NORM_BACKWARD.default, mended, "CPU", with_keyset=True)
    _libraries.append(library)


_libraries: list[torch.library.Library] = []
"""Registrations, which end with their library."""


def crashes(inputs: Tensor, wanted: Sequence[bool]) -> bool:
    """Whether stock torch would write unrequested gradients of a GroupNorm's inputs (B, C, ...).

    ``wanted`` says whether the gradients of inputs, weight and bias are requested.
    """
    if torch.__version__ >= GROUP_NORM_MENDED or wanted[0] or not any(wanted) or inputs.dim() not in (4, 5):
        return False
    layout = torch.channels_last if inputs.dim() == 4 else torch.channels_last_3d
    return inputs.is_contiguous(memory_format=layout)


def hidden_bytes(operator: Any, args: Sequence[Any]) -> int:
    """Bytes that a call of a mended operator takes on the processor while it runs, in addition to its outputs."""
    if getattr(operator, "overloadpacket", None) is not _GROUP_NORM_BACKWARD:
        return 0
    inputs, wanted = args[1], args[-1]
    return inputs.nbytes if inputs.device.type == "cpu" and crashes(inputs, wanted) else 0


def depthwise_workspace(inputs: Tensor, weight: Tensor) -> int:
    """Bytes that oneDNN takes for the gradient of a depthwise weight (C, 1, kh, kw) on inputs (B, C, H, W).

    In channels_last and float32, for kernels of more than three rows and on maps with fewer rows than the kernel, it
    computes the gradient as that of a dense convolution with 16x16 weights for each channel. It does so in a few other
    cases, too, such as with a dilation, which do not count here.
    """
    last = inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    own = weight.shape[2] <= WIDEST_DEPTHWISE and inputs.shape[2] >= weight.shape[2]
    dense = last and inputs.dtype == torch.float32 and not own
    return PADDED_CHANNELS * weight.numel() * torch.float32.itemsize if dense else 0


def shared_names(module: nn.Module) -> dict[str, str]:
    """Further names under which a state dict lists a tensor, with the first name of each.

    >>> tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> tied[1].weight = tied[0].weight
    >>> shared_names(tied)
    {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    tensors = {name: each for name, each in module.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    return {name: other for name, other in names.items() if name != other}


@contextmanager
def kept_shared(module: nn.Module) -> Iterator[None]:
    """Context for replacing the tensors of a module; parameters and buffers that were shared before are so after it."""
    shared = shared_names(module)
    yield
    for name, first in shared.items():
        set_tensor(module, name, get_tensor(module, first))


def get_tensor(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer, of any shape, by its name in the state dict."""
    return cast(Tensor, attrgetter(name)(module))


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer, of any shape, by its name in the state dict."""
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, tensor)


def has_global_hooks() -> bool:
    """Whether any hook is registered for all modules, other than torch's and snugfit's, which keep no arguments."""
    hooks = (hook for kind in _HOOK_KINDS for hook in getattr(nn_module, f"_global_{kind}").values())
    return any(str(getattr(hook, "__module__", "")).partition(".")[0] not in ("torch", "snugfit") for hook in hooks)


def to_channels_last(module: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Move a module to a device and its 4-dimensional tensors to channels_last, in place.

    ``module.to(memory_format=...)`` also tries those of five dimensions, which have no such format, and fails.
    """

    def moved(tensor: Tensor) -> Tensor:
        """A tensor of any shape, on the device."""
        memory_format = torch.channels_last if tensor.dim() == 4 else torch.preserve_format
        return tensor.to(device=device or tensor.device, memory_format=memory_format)

    with kept_shared(module):
        return cast(nn.Module, module._apply(moved))
