"""Address space that is reserved and not used: for kernels that oneDNN generates, and for BatchNorm's backward pass."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.hooks import RemovableHandle

from snugfit._quantities import format_bytes
from snugfit._upstream import depthwise_workspace

KERNEL_BYTES = 4 << 20
"""Address space for the kernels of one operator; VGGs, ResNets and MobileNets needed 3.1 MB at most."""
SPARE_BYTES = 1 << 20
"""Address space beside two gradients of a BatchNorm's input, for its other gradients and what the heap adds."""

_aten = torch.ops.aten
_GENERATING = frozenset(
    {
        _aten.convolution,
        _aten.convolution_backward,
        _aten.mm,
        _aten.addmm,
        _aten.bmm,
        _aten.baddbmm,
        _aten.mkldnn_rnn_layer,
    }
)

_NEEDED: dict[Any, int] = {}
"""Bytes of an operator's outputs and workspace by the shapes of its arguments; computing them takes a millisecond."""


class AddressSpace(Protocol):
    """A limit on the memory of a process that can be raised for a moment."""

    @property
    def left_bytes(self) -> float:
        """Bytes that the budget has left."""

    def has_address_space(self, size: int) -> bool:
        """Whether so many bytes can be mapped before the limit is set again."""

    def refresh(self, extra_bytes: int = 0) -> object:
        """Set the limit to what is left, and some bytes more."""


class KernelAllowance(TorchDispatchMode):
    """Lets operators generate kernels for shapes that are new to the process, although the memory limit is exact.

    A kernel reserves 0.25-1.5 MB of address space, of which some 20 kB are touched, and RLIMIT_DATA counts all of it.
    When a kernel is refused, oneDNN ends the process by a segmentation fault, or makes no further kernel on that thread
    for the rest of its life. So an operator that may generate kernels runs only if the budget has room for these beside
    its outputs, and the limit no longer counts what earlier kernels have reserved and not touched.
    """

    def __init__(self, limit: AddressSpace) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in _GENERATING or _on_meta(args):
            return func(*args, **(kwargs or {}))
        self._require(func, args, kwargs or {})
        self.limit.refresh()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.limit.refresh()

    def _require(self, func: Any, args: Any, kwargs: Any) -> None:
        key = (func, tuple(map(_shape, tree_iter((args, kwargs)))))
        if key not in _NEEDED:
            _NEEDED[key] = _output_bytes(func, args, kwargs) + _workspace_bytes(func, args)
        needed = _NEEDED[key] + KERNEL_BYTES
        left = self.limit.left_bytes
        if needed > left:
            raise MemoryError(f"out of memory: {func} needs {format_bytes(needed)}, and {format_bytes(left)} are left")


def _shape(value: Any) -> Any:
    """The part of an argument that outputs and workspace depend on, such as a tensor's shape."""
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def _output_bytes(func: Any, args: Any, kwargs: Any) -> int:
    on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    outputs = func(*on_meta[0], **on_meta[1])
    return sum(output.nbytes for output in tree_iter(outputs) if isinstance(output, Tensor))


def _workspace_bytes(func: Any, args: Any) -> int:
    """Bytes that an operator takes beside its outputs, where they are known to be many."""
    if func.overloadpacket is not _aten.convolution_backward:
        return 0
    (_, inputs, weight), (transposed, _, groups, wanted) = args[:3], args[-4:]
    depthwise = groups == len(weight) > 1 == weight.shape[1] and not transposed
    return depthwise_workspace(inputs, weight) if depthwise and wanted[1] else 0


def _on_meta(args: Any) -> bool:
    """Whether an operator runs on the meta device only and takes no memory."""
    return any(isinstance(item, Tensor) and item.is_meta for item in tree_iter(args))


def allow_batch_norm_backward(limit: AddressSpace) -> RemovableHandle:
    """Let the backward pass of every BatchNorm layer of the process reserve memory that it never touches.

    On the processor torch allocates the gradient of the input, and then allocates it again for contiguous feature maps
    before it frees the first. ``RLIMIT_DATA`` counts both, although only one becomes resident. Where the limit lacks
    room for both, address space for the other is granted if the budget has enough left for the one that is touched, so
    that the budget still holds.
    """

    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            return
        node = _batch_norm_node(output.grad_fn) if isinstance(output, Tensor) else None
        if node is None:
            return
        needed, granted = output.nbytes, False

        def before_backward(gradients: Any) -> None:
            nonlocal granted
            granted = not limit.has_address_space(2 * needed + SPARE_BYTES)
            if granted:
                limit.refresh(needed if limit.left_bytes >= needed else 0)

        def after_backward(gradients: Any, outputs: Any) -> None:
            if granted:
                limit.refresh()

        node.register_prehook(before_backward)
        node.register_hook(after_backward)

    return register_module_forward_hook(after_forward)


def _batch_norm_node(node: Any) -> Any:
    """The BatchNorm node at or before ``node``, if any: a layer may apply its activation itself, as timm's do."""
    while node is not None and "BatchNorm" not in node.name():
        node = node.next_functions[0][0] if node.next_functions else None
    return node
