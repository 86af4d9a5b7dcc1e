"""A stretch of a traced network as a module of its own, with the network's own layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx


def part_of(module: fx.GraphModule, nodes: Sequence[fx.Node], entry: fx.Node) -> fx.GraphModule:
    """Make a module of consecutive nodes of a network's graph; it shares the network's layers and their names.

    Args:
        module: the traced network.
        nodes: in order of execution, such as ``ModuleBlock.nodes``; the last one's value is returned. Constants
            (``get_attr``) come along by themselves.
        entry: the node whose value enters; no other value may.

    Raises:
        KeyError: another value than the entry's enters.
    """
    graph = fx.Graph()
    copies = {entry: graph.placeholder(entry.name)}

    def copy_of(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in copies:
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(copies[nodes[-1]])
    return fx.GraphModule(module, graph, class_name="Part")


def computed(part: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a part that answer one by one to those that it was made of."""
    return [node for node in part.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
