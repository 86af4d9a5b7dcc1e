"""Parts of a traced network as modules of their own, with the network's own layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules import pooling
from torch.nn.modules.dropout import _DropoutNd

from snugfit._chain.hooks import hook_of
from snugfit._chain.propagation import node_shapes
from snugfit._chain.tracing import assemble, attributes_of
from snugfit._upstream import has_global_hooks

_TAIL_MODULES: tuple[type[nn.Module], ...] = (
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    pooling._AdaptiveAvgPoolNd,
    pooling._AdaptiveMaxPoolNd,
    nn.Identity,
    _DropoutNd,
)
_POOLS = (F, "max_pool"), (F, "avg_pool"), (F, "adaptive_avg_pool"), (torch, "max_pool")
_TAIL_FUNCTIONS = {getattr(place, f"{name}{axes}d") for place, name in _POOLS for axes in (1, 2, 3)}
_AVERAGE_MODULES = nn.AvgPool2d, nn.AdaptiveAvgPool2d
_AVERAGE_FUNCTIONS = {F.avg_pool2d, F.adaptive_avg_pool2d, torch.mean, "mean"}


def copy_nodes(nodes: Sequence[fx.Node], entry: fx.Node, last: fx.Node, name: str = "x") -> fx.Graph:
    """Copy consecutive nodes of a graph, and the constants that they read, to a graph of their own.

    The value of ``entry`` is its input, under this name, and that of ``last`` its output.

    Raises:
        KeyError: another value enters.
    """
    graph = fx.Graph()
    copies = {entry: graph.placeholder(name)}

    def copy_of(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in copies:
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(copies[last])
    return graph


def subgraph_module(module: fx.GraphModule, nodes: Sequence[fx.Node], entry: fx.Node) -> fx.GraphModule:
    """Build a module from consecutive nodes of a network's graph; it shares the network's layers and their names.

    The last node's value is returned; see :func:`copy_nodes`.
    """
    return fx.GraphModule(module, copy_nodes(nodes, entry, nodes[-1], entry.name), class_name="Part")


def computed_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that compute something, in order; not its inputs, constants and output."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def layers_called_once(module: nn.Module) -> list[nn.Module]:
    """The layers that a unit's graph calls, and that nothing else runs or reads in a forward pass.

    There are none of a module without a graph. A layer with hooks is left out, since these may read its weight.
    """
    if not isinstance(module, fx.GraphModule) or has_global_hooks():
        return []
    called = [module.get_submodule(str(node.target)) for node in module.graph.nodes if node.op == "call_module"]
    runs = Counter(id(layer) for each in called for layer in each.modules())
    read = {str(node.target).rpartition(".")[0] for node in module.graph.nodes if node.op == "get_attr"}
    others = {id(module.get_submodule(name)) for name in read}
    return [each for each in called if runs[id(each)] == 1 and id(each) not in others and hook_of(each) is None]


def input_node(graph: fx.Graph) -> fx.Node:
    """The input of a graph, or the first one of several."""
    found: fx.Node = next(node for node in graph.nodes if node.op == "placeholder")
    return found


def split_tail(module: fx.GraphModule) -> tuple[fx.GraphModule, nn.Module]:
    """Split a unit into body and tail, ``unit(x) = tail(body(x))``; layers and weights are shared with the unit.

    The tail consists of the final nodes that only pool or drop; none has weights. It does not change the feature map,
    even with dropout in place. If the unit ends otherwise the tail is an identity, and the body is the unit itself.
    """
    attributes = attributes_of(module)
    nodes = computed_nodes(module.graph)
    tail: list[fx.Node] = []
    while len(nodes) > 1 and _is_tail(nodes[-1], nodes[-2], attributes):
        tail.insert(0, nodes.pop())
    if not tail:
        return module, nn.Identity()
    return _body(module, nodes[-1], tail), _tail(module, tail)


def averaged_side(module: fx.GraphModule, input_shape: tuple[int, ...]) -> int | None:
    """Shorter side of what a module's first operation averages a feature map (C, H, W) to; None if it is another one.

    It is 1 if the operation removes both axes.
    """
    first = computed_nodes(module.graph)[0]
    if first.op == "call_module":
        averages = isinstance(attributes_of(module)[str(first.target)], _AVERAGE_MODULES)
    else:
        averages = first.target in _AVERAGE_FUNCTIONS
    shape = (node_shapes(module, input_shape)[first] or ())[1:] if averages else ()
    if len(input_shape) != 3 or shape[:1] != input_shape[:1] or len(shape) not in (1, 3):
        return None
    return min(shape[1:], default=1)


def _is_tail(node: fx.Node, before: fx.Node, attributes: dict[str, Any]) -> bool:
    """Whether a node pools or drops the value of the node before it, and nothing else."""
    if node.all_input_nodes != [before] or len(before.users) != 1:
        return False
    if node.op == "call_module":
        return isinstance(attributes[str(node.target)], _TAIL_MODULES)
    return node.op == "call_function" and node.target in _TAIL_FUNCTIONS


def _body(module: fx.GraphModule, last: fx.Node, tail: list[fx.Node]) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(module.graph, copies)
    for node in reversed(tail):
        graph.erase_node(copies[node])
    graph.output(copies[last])
    return assemble(graph, attributes_of(module, graph), set(module.state_dict()))


def _tail(module: fx.GraphModule, tail: list[fx.Node]) -> fx.GraphModule:
    graph, own = fx.Graph(), {str(node.target) for node in tail}
    entry = graph.placeholder("x")
    if any(getattr(found, "inplace", False) for name, found in attributes_of(module).items() if name in own):
        entry = graph.call_method("clone", (entry,))  # other readers of the feature map must not see the dropout
    copies = {node: entry for node in module.graph.nodes if node not in tail and node.op != "output"}
    graph.output(graph.graph_copy(module.graph, copies))
    return assemble(graph, attributes_of(module, graph), set())
