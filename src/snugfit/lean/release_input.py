"""Free a batch of images as soon as the network has read it: the backward pass of a frozen first layer needs it not.

Whoever calls a network holds what he gives it, and so do the frames in between, so that the batch would stay in memory
to the end of the step. Training steps of frozen networks may empty it instead.
"""

from __future__ import annotations

from torch import Tensor, fx, nn

_NAME = "images_are_read"
"""Path of the module that empties them; nothing of it is in the state dict."""


def empty_images(module: fx.GraphModule) -> bool:
    """Let a network empty the tensor of images that it is given behind their last reader, in training mode, in place.

    The tensor is left without elements (``Tensor.set_``); views of the same memory that somebody else holds keep it. A
    tensor that requires a gradient, and any tensor in evaluation mode, is left as it is. Call it when the graph is
    settled, after ``run_by_sample`` and ``overwrite_maps``, and :func:`keep_images` before either is called again.

    Args:
        module: a traced network with one input.

    Returns:
        Whether it will: not where parameters of a layer that reads images train, whose gradients need them.
    """
    keep_images(module)
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


def keep_images(module: fx.GraphModule) -> None:
    """Undo :func:`empty_images`, in place."""
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
            images.set_()  # type: ignore[call-overload]
