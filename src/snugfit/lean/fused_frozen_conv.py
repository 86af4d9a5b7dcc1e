"""Frozen convolution, BatchNorm and activation in one feature map, forward and backward, instead of two or three.

BatchNorm on running statistics is an affine function of every value. No gradient needs its input or output if gamma is
frozen. So it may overwrite the convolution's output, and the activation after it too; in the backward pass the incoming
gradient may become the outgoing one. A convolution (and its norm) then peaks at its own input and output, which is what
the analytic figures count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx, nn

from snugfit.lean.activation import LeanLeakyReLU, LeanReLU, LeanReLU6
from snugfit.lean.batchnorm import LeanBatchNorm2d
from snugfit.lean.convolution import LeanConv2d
from snugfit.lean.inplace_permissions import allow_inplace, forbid_inplace
from snugfit.lean.int8_weights import Int8Conv2d, Int8Linear
from snugfit.lean.per_sample import graph_of
from snugfit.lean.pooling import LeanAdaptiveAvgPool2d
from snugfit.lean.standardised_conv import StandardisedConv2d

_CONVOLUTIONS = (nn.Conv2d, LeanConv2d, Int8Conv2d, StandardisedConv2d)
"""Layers that keep nothing of their output; the gradient of their input is a new tensor."""
_READERS = (*_CONVOLUTIONS, nn.Linear, Int8Linear, nn.AdaptiveAvgPool2d, LeanAdaptiveAvgPool2d)
"""Layers that pass back a new tensor, and whose saved tensors an activation in place cannot change."""
_NORMS = (nn.BatchNorm2d, LeanBatchNorm2d)
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, LeanReLU, LeanReLU6, LeanLeakyReLU)


def enable_inplace(module: fx.GraphModule) -> tuple[str, ...]:
    """Let norms and activations behind convolutions overwrite the convolution's feature map.

    A norm overwrites the output of a convolution if it is the only reader; an activation overwrites that of a norm. A
    gradient is overwritten where it is unshared: behind a norm that only an activation reads, and behind a norm or
    activation that only one convolution, linear layer or adaptive average pool reads; not behind additions, other pools
    and views.

    This applies to lean layers (:func:`snugfit.lean.use_lean`, before or after this call), in calls where the norm is
    in evaluation mode, its gamma is frozen and its precision is the feature map's. Otherwise, and while one of these
    layers has a hook, layers run as before. On a graphics processor norms write a new output. Numbers do not change. It
    combines with :func:`run_per_sample` and :func:`store_int8`, in any order.

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
