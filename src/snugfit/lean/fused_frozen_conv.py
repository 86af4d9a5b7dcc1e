"""Frozen convolution, BatchNorm and activation in one map, forward and backward, where two or three would be alive.

BatchNorm on running statistics is an affine map of every value, of whose input and output no gradient has need where
gamma is frozen. So it may write into the convolution's output, and the activation after it too; on the way back the
gradient that comes in may become the one that goes out. A convolution (and its norm) then peaks at its own input and
output, which is what the analytic figures count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx, nn

from snugfit.lean.activation import LeanLeakyReLU, LeanReLU, LeanReLU6
from snugfit.lean.batchnorm import LeanBatchNorm2d
from snugfit.lean.convolution import LeanConv2d
from snugfit.lean.inplace_permissions import give_leave, take_leave
from snugfit.lean.int8_weights import StoredConv2d, StoredLinear
from snugfit.lean.per_sample import graph_of
from snugfit.lean.pooling import LeanAdaptiveAvgPool2d
from snugfit.lean.standardised_conv import StandardisedConv2d

_CONVOLUTIONS = (nn.Conv2d, LeanConv2d, StoredConv2d, StandardisedConv2d)
"""They keep nothing of their output, and the gradient of their input is a new tensor."""
_READERS = (*_CONVOLUTIONS, nn.Linear, StoredLinear, nn.AdaptiveAvgPool2d, LeanAdaptiveAvgPool2d)
"""Layers that pass back a new tensor, and keep nothing of what they read that an activation could spoil."""
_NORMS = (nn.BatchNorm2d, LeanBatchNorm2d)
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, LeanReLU, LeanReLU6, LeanLeakyReLU)


def overwrite_maps(module: fx.GraphModule) -> tuple[str, ...]:
    """Let the norms and activations behind convolutions work in the convolution's map, in place.

    A norm overwrites the output of a convolution that it alone reads, an activation that of a norm. A gradient is
    overwritten where it surely is nobody else's: behind a norm that an activation alone reads, and behind a norm or
    activation that one convolution, linear layer or adaptive average pool alone reads; not behind additions, other
    pools and views. It holds for
    lean layers (:func:`snugfit.lean.use_lean`, before or after this call), in calls where the norm is in evaluation
    mode, its gamma does not train and its precision is the map's; elsewhere, and while one of these layers has a hook,
    layers do as before, and on a graphics processor norms make their output anew. Numbers stay what they are. Goes
    with :func:`run_by_sample` and :func:`store_int8`, in any order.

    Call it when the graph is settled, and again when it was changed: what is told from this graph may not hold in
    another that shares its layers. A norm that is called by itself overwrites what it is given.

    Args:
        module: a traced network; one with side modules is fine.

    Returns:
        Names of the norms that may overwrite their input; empty where there is none.
    """
    keep_maps(module)
    nodes = {node: layer for node, layer in _calls(module) if layer is not None}
    norms = _everywhere(nodes, {node for node in nodes if _follows(node, nodes, _NORMS, _CONVOLUTIONS)})
    activations = _everywhere(nodes, {node for node in nodes if _follows(node, nodes, _ACTIVATIONS, _NORMS)})
    own = {node for node in norms | activations if type(_reader(node, nodes)) in _READERS}
    own |= {node for node in norms if type(_reader(node, nodes)) in _ACTIVATIONS}
    own = _everywhere(nodes, own)
    for layer in {nodes[node] for node in norms | activations}:
        calls = [node for node, each in nodes.items() if each is layer]
        neighbours = {nodes[near] for node in calls for near in (*node.all_input_nodes, *node.users) if near in nodes}
        give_leave(layer, gradient=calls[0] in own, neighbours=neighbours)
    return tuple(dict.fromkeys(str(node.target) for node in nodes if node in norms))


def keep_maps(module: nn.Module) -> None:
    """Undo :func:`overwrite_maps`, in place."""
    for layer in module.modules():
        take_leave(layer)


def _calls(module: fx.GraphModule) -> Iterator[tuple[fx.Node, nn.Module | None]]:
    """The calls of layers; None for one that may also run where the graph does not show it."""
    called = {str(node.target) for node in graph_of(module).nodes if node.op == "call_module"}
    paths = Counter(id(layer) for name in called for layer in module.get_submodule(name).modules())
    for node in graph_of(module).nodes:
        if node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            yield node, layer if paths[id(layer)] == 1 else None


def _everywhere(nodes: dict[fx.Node, nn.Module], found: set[fx.Node]) -> set[fx.Node]:
    """Those of the calls whose layer has no call that is not among them."""
    others = {layer for node, layer in nodes.items() if node not in found}
    return {node for node in found if nodes[node] not in others}


def _follows(node: fx.Node, nodes: dict[fx.Node, nn.Module], kinds: tuple[type, ...], before: tuple[type, ...]) -> bool:
    """Whether a call is that of a layer of some kind which alone reads what a layer of another makes."""
    sources = node.all_input_nodes
    return (
        type(nodes[node]) in kinds
        and len(sources) == 1
        and type(nodes.get(sources[0])) in before
        and list(sources[0].users) == [node]
    )


def _reader(node: fx.Node, nodes: dict[fx.Node, nn.Module]) -> nn.Module | None:
    """The layer that alone reads what a call makes."""
    users = list(node.users)
    return nodes.get(users[0]) if len(users) == 1 else None
