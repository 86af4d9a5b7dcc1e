"""Address space for BatchNorm's backward pass, which reserves its result twice and uses one of the two."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from snugfit.memory.kernels import AddressSpace


def allow_batch_norm_backward(limit: AddressSpace) -> RemovableHandle:
    """Let the backward pass of every BatchNorm layer reserve memory that it never touches.

    On the processor torch allocates the gradient of the input, and then allocates it again for contiguous feature maps
    before it frees the first. ``RLIMIT_DATA`` counts both, although only one becomes resident. Without address space
    for the other, a step that fits the budget would be refused. It is granted only if the budget has enough left for
    the one that is touched, so that the budget still holds.

    Returns:
        The handle of the hook, which acts on all modules of the process.
    """

    def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            return
        node = _batch_norm_node(output.grad_fn) if isinstance(output, Tensor) else None
        if node is None:
            return
        needed = output.nbytes

        def before_backward(gradients: Any) -> None:
            limit.refresh(needed if limit.left_bytes >= needed else 0)

        def after_backward(gradients: Any, outputs: Any) -> None:
            limit.refresh()

        node.register_prehook(before_backward)
        node.register_hook(after_backward)

    return register_module_forward_hook(after_forward)


def _batch_norm_node(node: Any) -> Any:
    """The BatchNorm node at or before ``node``, if any: a layer may apply its activation itself, as timm's do."""
    while node is not None and "BatchNorm" not in node.name():
        node = node.next_functions[0][0] if node.next_functions else None
    return node
