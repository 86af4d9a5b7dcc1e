"""Switches for the memory of a whole network, in place: lean layers, layers that overwrite, images that are freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from snugfit.lean.activation import LeanLeakyReLU, LeanReLU, LeanReLU6
from snugfit.lean.batchnorm import LeanBatchNorm1d, LeanBatchNorm2d, LeanBatchNorm3d
from snugfit.lean.convolution import LeanConv2d, StandardisedConv2d
from snugfit.lean.int8_weights import Int8Conv2d, Int8Linear
from snugfit.lean.per_sample import graph_of
from snugfit.lean.pooling import LeanAdaptiveAvgPool2d, LeanAvgPool2d, LeanMaxPool2d
from snugfit.lean.saved_tensors import allow_inplace, forbid_inplace

_RELEASE = "images_are_read"
"""Path of the module that empties the images; it is not in the state dict."""
_LEAN: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: LeanConv2d,
    nn.BatchNorm1d: LeanBatchNorm1d,
    nn.BatchNorm2d: LeanBatchNorm2d,
    nn.BatchNorm3d: LeanBatchNorm3d,
    nn.ReLU: LeanReLU,
    nn.ReLU6: LeanReLU6,
    nn.LeakyReLU: LeanLeakyReLU,
    nn.MaxPool2d: LeanMaxPool2d,
    nn.AvgPool2d: LeanAvgPool2d,
    nn.AdaptiveAvgPool2d: LeanAdaptiveAvgPool2d,
}
_STOCK = {lean: stock for stock, lean in _LEAN.items()}
_CONVOLUTIONS = (nn.Conv2d, LeanConv2d, Int8Conv2d, StandardisedConv2d)
"""Layers that keep nothing of their output; the gradient of their input is a new tensor."""
_READERS = (*_CONVOLUTIONS, nn.Linear, Int8Linear, nn.AdaptiveAvgPool2d, LeanAdaptiveAvgPool2d)
"""Layers that pass back a new tensor, and whose saved tensors an activation in place cannot change."""
_NORMS = (nn.BatchNorm2d, LeanBatchNorm2d)
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, LeanReLU, LeanReLU6, LeanLeakyReLU)


def use_lean(module: nn.Module) -> None:
    """Replace every layer of any module that has a lean version, in place.

    ``requires_grad`` is read in every call and may change in between. Weights, state dict, hooks and outputs do not
    change; subclasses of torch's layers are left unchanged, because they may compute something else. Call
    :func:`use_stock` before the module is traced by ``torch.fx``, or pickled for use without snugfit.
    """
    _swap(module, _LEAN)


def use_stock(module: nn.Module) -> None:
    """Undo :func:`use_lean` and :func:`use_lean_convolutions`, in place."""
    _swap(module, _STOCK)


def use_lean_convolutions(module: nn.Module) -> None:
    """Replace every plain ``nn.Conv2d`` of a module by a :class:`LeanConv2d`, and leave the other layers."""
    _swap(module, {nn.Conv2d: LeanConv2d})


def _swap(module: nn.Module, kinds: dict[type[nn.Module], type[nn.Module]]) -> None:
    for layer in module.modules():
        if type(layer) in kinds:
            layer.__class__ = kinds[type(layer)]


def enable_inplace(module: fx.GraphModule) -> tuple[str, ...]:
    """Let norms and activations behind convolutions overwrite the convolution's feature map.

    BatchNorm on running statistics is an affine function of every value, and no gradient needs its input or output if
    gamma is frozen. So frozen convolution, norm and activation can share one feature map, forward and backward.

    A norm overwrites the output of a convolution if it is the only reader; an activation overwrites that of a norm. A
    gradient is overwritten where it is unshared: behind a norm that only an activation reads, and behind a norm or
    activation that only one convolution, linear layer or adaptive average pool reads; not behind additions, other pools
    and views.

    This applies to lean layers (:func:`snugfit.lean.use_lean`, before or after this call), in calls where the norm is
    in evaluation mode, its gamma is frozen and its precision is the feature map's. Otherwise, and while one of these
    layers has a hook, layers run as before. On a graphics processor norms write a new output. Numbers do not change. It
    combines with :func:`snugfit.lean.run_per_sample` and :func:`snugfit.lean.store_int8`, in any order.

    Call it once the graph is final, and again when it has changed: permissions derived from this graph may not hold in
    another that shares its layers. A norm that is called on its own overwrites its input.

    Args:
        module: a traced network; side modules are allowed.

    Returns:
        Names of the norms that may overwrite their input; empty if there are none.
    """
    disable_inplace(module)
    nodes = {node: layer for node, layer in _calls(module) if layer is not None}
    norms = _everywhere(nodes, {node for node in nodes if _follows(node, nodes, _NORMS, _CONVOLUTIONS)})
    activations = _everywhere(nodes, {node for node in nodes if _follows(node, nodes, _ACTIVATIONS, _NORMS)})
    own = {node for node in norms | activations if type(_reader(node, nodes)) in _READERS}
    own |= {node for node in norms if type(_reader(node, nodes)) in _ACTIVATIONS}
    own = _everywhere(nodes, own)
    for layer in {nodes[node] for node in norms | activations}:
        calls = [node for node, each in nodes.items() if each is layer]
        neighbours = {nodes[near] for node in calls for near in (*node.all_input_nodes, *node.users) if near in nodes}
        allow_inplace(layer, gradient=calls[0] in own, neighbours=neighbours)
    return tuple(dict.fromkeys(str(node.target) for node in nodes if node in norms))


def disable_inplace(module: nn.Module) -> None:
    """Undo :func:`enable_inplace`, in place."""
    for layer in module.modules():
        forbid_inplace(layer)


def _calls(module: fx.GraphModule) -> Iterator[tuple[fx.Node, nn.Module | None]]:
    """The calls of layers; None for a layer that may also run where the graph does not show it."""
    called = {str(node.target) for node in graph_of(module).nodes if node.op == "call_module"}
    paths = Counter(id(layer) for name in called for layer in module.get_submodule(name).modules())
    for node in graph_of(module).nodes:
        if node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            yield node, layer if paths[id(layer)] == 1 else None


def _everywhere(nodes: dict[fx.Node, nn.Module], found: set[fx.Node]) -> set[fx.Node]:
    """The calls in ``found`` whose layer has no call outside ``found``."""
    others = {layer for node, layer in nodes.items() if node not in found}
    return {node for node in found if nodes[node] not in others}


def _follows(node: fx.Node, nodes: dict[fx.Node, nn.Module], kinds: tuple[type, ...], before: tuple[type, ...]) -> bool:
    """Whether a call runs a layer of one of ``kinds`` that is the only reader of a layer of one of ``before``."""
    sources = node.all_input_nodes
    return (
        type(nodes[node]) in kinds
        and len(sources) == 1
        and type(nodes.get(sources[0])) in before
        and list(sources[0].users) == [node]
    )


def _reader(node: fx.Node, nodes: dict[fx.Node, nn.Module]) -> nn.Module | None:
    """The only layer that reads the output of a call; None if there are several."""
    users = list(node.users)
    return nodes.get(users[0]) if len(users) == 1 else None


def release_images(module: fx.GraphModule) -> bool:
    """Let a network empty its tensor of images behind the last reader, in training mode, in place.

    The caller of a network holds its input, so the batch would stay in memory until the end of the step. The tensor is
    left without elements (``Tensor.set_``); other views of the same memory keep it. A tensor that requires a gradient,
    and any tensor in evaluation mode, is left unchanged. Call it once the graph is final, after ``run_per_sample`` and
    ``enable_inplace``, and call :func:`retain_images` before either is called again.

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
    module.add_submodule(_RELEASE, _Emptied())
    with module.graph.inserting_after(last):
        module.graph.call_module(_RELEASE, (images,))
    module.recompile()
    return True


def retain_images(module: fx.GraphModule) -> None:
    """Undo :func:`release_images`, in place."""
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == _RELEASE:
            module.graph.erase_node(node)
            module.recompile()
    if hasattr(module, _RELEASE):
        delattr(module, _RELEASE)


class _Emptied(nn.Module):
    def forward(self, images: Tensor) -> None:
        """Empty images (B, C, H, W) in training mode."""
        if self.training and not images.requires_grad:
            torch.ops.aten.set_(images)
