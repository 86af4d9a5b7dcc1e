"""Divide a unit into what computes its map and the pools and dropouts that end it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from snugfit._chain.tracing import assemble, attributes_of

_TAIL_MODULES: tuple[type[nn.Module], ...] = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Identity, _DropoutNd,
)  # fmt: skip
_TAIL_FUNCTIONS = {
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
}  # fmt: skip


def split_tail(module: fx.GraphModule) -> tuple[fx.GraphModule, nn.Module]:
    """A unit's body and its tail, ``unit(x) = tail(body(x))``; layers and weights are shared with the unit.

    The tail leaves the map as it is, even where it drops in place.

    The tail is what ends the unit and only pools or drops: no part of it has weights. It is an identity where the unit
    ends otherwise, and the body is then the unit itself.
    """
    attributes = attributes_of(module)
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
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
        entry = graph.call_method("clone", (entry,))  # whoever else reads the map must not see it dropped
    copies = {node: entry for node in module.graph.nodes if node not in tail and node.op != "output"}
    graph.output(graph.graph_copy(module.graph, copies))
    return assemble(graph, attributes_of(module, graph), set())
