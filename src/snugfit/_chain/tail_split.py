"""Split a unit into the body that computes its feature map, and the final pools and dropouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules import pooling
from torch.nn.modules.dropout import _DropoutNd

from snugfit._chain.subgraph import computed_nodes
from snugfit._chain.tracing import assemble, attributes_of

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
