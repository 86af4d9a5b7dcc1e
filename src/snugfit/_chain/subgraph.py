"""A part of a traced network as a module of its own, with the network's own layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx


def subgraph_module(module: fx.GraphModule, nodes: Sequence[fx.Node], entry: fx.Node) -> fx.GraphModule:
    """Build a module from consecutive nodes of a network's graph; it shares the network's layers and their names.

    Args:
        module: the traced network.
        nodes: in order of execution, such as ``ModuleBlock.nodes``; the last one's value is returned. Constants
                (``get_attr``) are included automatically.
        entry: the node whose value is the input; no other value may enter.

    Raises:
        KeyError: another value enters.
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


def computed_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that compute something, in order; not its inputs, constants and output."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def input_node(graph: fx.Graph) -> fx.Node:
    """The input of a graph, or the first one of several."""
    found: fx.Node = next(node for node in graph.nodes if node.op == "placeholder")
    return found
