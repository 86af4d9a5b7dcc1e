"""Reading the batch size where it is used, so that no number crosses from one unit to the next."""

from __future__ import annotations

import operator

from torch import fx

from snugfit._chain.propagation import BATCH, Shapes


def read_batch_size_locally(graph: fx.Graph, shapes: Shapes) -> None:
    """Let every user of ``x.size(0)`` or ``x.shape[0]`` read the size of its own input instead; in place."""
    for node in list(graph.nodes):
        if not _is_batch_size(node):
            continue
        for user in list(node.users):
            tensor = user.args[0] if user.args else None
            if not isinstance(tensor, fx.Node) or (shapes.get(tensor) or ())[:1] != (BATCH,):
                continue
            with graph.inserting_before(user):
                size = graph.call_method("size", (tensor, 0))
            size.meta = dict(user.meta)
            shapes[size] = None
            user.replace_input_with(node, size)
    for node in reversed(list(graph.nodes)):
        if not node.users and (_is_batch_size(node) or _is_shape(node)):
            graph.erase_node(node)


def _is_shape(node: fx.Node) -> bool:
    """Whether a node is ``x.shape``, ``x.size()``, or an item of one of them."""
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_shape(source)
    if node.op == "call_function":
        return node.target is getattr and node.args[1] == "shape"
    return node.op == "call_method" and node.target == "size" and len(node.args) == 1


def _is_batch_size(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target == "size":
        return bool(node.args[1:] == (0,))
    if node.op == "call_function" and node.target is operator.getitem:
        return _is_shape(node) and bool(node.args[1] == 0)
    return False
