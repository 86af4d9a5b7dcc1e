"""Free a batch of images once the network has read it, if the first layer is frozen and its backward pass needs none.

The caller of a network holds its input, and so do the frames in between, so the batch would stay in memory until the
end of the step. Training steps of frozen networks may empty it instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

_NAME = "images_are_read"
"""Path of the module that empties them; it is not in the state dict."""


def release_images(module: fx.GraphModule) -> bool:
    """Let a network empty its tensor of images behind the last reader, in training mode, in place.

    The tensor is left without elements (``Tensor.set_``); other views of the same memory keep it. A tensor that
    requires a gradient, and any tensor in evaluation mode, is left unchanged. Call it once the graph is final, after
    ``run_per_sample`` and ``enable_inplace``, and call :func:`retain_images` before either is called again.

    Args:
        module: a traced network with one input.

    Returns:
        Whether it will; it does not if a layer that reads images has trained parameters, whose gradients need them.
    """
    retain_images(module)
    images = next(node for node in module.graph.nodes if node.op == "placeholder")
    layers = [module.get_submodule(str(user.target)) for user in images.users if user.op == "call_module"]
    if not images.users or any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        return False
    last = [node for node in module.graph.nodes if node in images.users][-1]
    module.add_submodule(_NAME, _Emptied())
    with module.graph.inserting_after(last):
        module.graph.call_module(_NAME, (images,))
    module.recompile()
    return True


def retain_images(module: fx.GraphModule) -> None:
    """Undo :func:`release_images`, in place."""
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == _NAME:
            module.graph.erase_node(node)
            module.recompile()
    if hasattr(module, _NAME):
        delattr(module, _NAME)


class _Emptied(nn.Module):
    def forward(self, images: Tensor) -> None:
        """Empty images (B, C, H, W) in training mode."""
        if self.training and not images.requires_grad:
            torch.ops.aten.set_(images)
