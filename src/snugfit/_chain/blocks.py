"""The blocks that a model's author wrote: inverted residuals, bottlenecks, or single convolutions of a plain stack.

A unit is the smallest part that can train alone; a module block is what papers number and draw. MobileNetV2's block
2 is ``features.2``, whose expansion, depthwise convolution and projection are units of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from torch import fx, nn

from snugfit._chain.propagation import Shapes, node_shapes
from snugfit._chain.subgraph import computed_nodes, input_node
from snugfit._chain.tracing import LAYERS, path_of

SIDE_NETWORK = "side"
"""Path of side modules; each belongs to the block that it is attached to."""


@dataclass(frozen=True)
class ModuleBlock:
    """Consecutive nodes of a network's graph, entered by the value of ``entry`` and left by the last node's.

    The name is the path of the module that holds them, such as ``features.2``. Shapes are without the batch axis.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    entry: fx.Node
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]

    def layers(self, module: fx.GraphModule) -> list[nn.Module]:
        """Its layers, in order of execution."""
        return [module.get_submodule(str(node.target)) for node in self.nodes if node.op == "call_module"]


def find_blocks(module: fx.GraphModule, input_shape: tuple[int, ...]) -> tuple[ModuleBlock, ...]:
    """Split a traced network into the blocks that its author wrote; allocates nothing and changes nothing.

    A block consists of the nodes under one module path up to and including its first run of numbers: ``features.2``,
    ``layer1.0``, ``blocks.0.0``. Nodes without a convolution or linear layer belong to the block before them, until the
    feature map is pooled to one pixel or flattened: everything after that is the last block. Blocks are merged if more
    than one tensor crosses between them; an image that a side module reads does not count.

    Args:
        module: a traced network, such as ``Chain.to_module()``; may be on meta.
        input_shape: channels, height, width of one image.
    """
    shapes = node_shapes(module, input_shape)
    entry = input_node(module.graph)
    nodes = computed_nodes(module.graph)
    blocks: list[ModuleBlock] = []
    for path, part in _joined(_named(module, nodes, shapes)):
        first = next((str(node.target) for node in part if _holds_layer(module, [node])), "network")
        shape_in, shape_out = _sample(shapes, entry), _sample(shapes, part[-1])
        blocks.append(ModuleBlock(path or first, tuple(part), entry, shape_in, shape_out))
        entry = part[-1]
    return tuple(blocks)


def _sample(shapes: Shapes, node: fx.Node) -> tuple[int, ...]:
    return tuple((shapes[node] or ())[1:])


def _named(module: fx.GraphModule, nodes: list[fx.Node], shapes: Shapes) -> list[tuple[str, list[fx.Node]]]:
    """Consecutive nodes of one path; each part holds a layer."""
    parts: list[tuple[str, list[fx.Node]]] = []
    ended = False
    for node in nodes:
        if parts and is_side(node):
            parts[-1][1].append(node)
            continue
        shape, path = shapes[node], _block_path(path_of(node))
        ends = shape is not None and (len(shape) < 4 or shape[2:] == (1, 1))
        if not parts or (ends and not ended):
            begins = True
        elif ended or path in ("", parts[-1][0]):
            begins = False
        else:
            begins = _opens(module, node, path, nodes) and _holds_layer(module, parts[-1][1])
        if begins:
            parts.append((path, []))
        parts[-1][1].append(node)
        ended |= ends
    return parts


def _opens(module: fx.GraphModule, node: fx.Node, path: str, nodes: list[fx.Node]) -> bool:
    """Whether a block may start here: at a layer, or at the first node of a path that has one (pre-activation)."""
    own = [other for other in nodes if _block_path(path_of(other)) == path]
    return _holds_layer(module, [node]) or (own[0] is node and _holds_layer(module, own))


def _holds_layer(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> bool:
    return any(n.op == "call_module" and isinstance(module.get_submodule(str(n.target)), LAYERS) for n in nodes)


def _joined(parts: list[tuple[str, list[fx.Node]]]) -> list[tuple[str, list[fx.Node]]]:
    """Merge parts until a single value crosses from each to the next."""
    joined: list[tuple[str, list[fx.Node]]] = []
    for name, part in parts:
        if joined and _crossing(joined[-1][1], joined):
            joined[-1][1].extend(part)
        else:
            joined.append((name, list(part)))
    return joined


def _crossing(part: list[fx.Node], joined: list[tuple[str, list[fx.Node]]]) -> bool:
    """Whether any value except the last is used outside the parts so far."""
    inside = {node for _, nodes in joined for node in nodes}
    image = input_node(part[0].graph)
    side = {user for user in image.users if is_side(user)}
    return any(user not in inside | side for node in {image, *inside} - {part[-1]} for user in node.users)


def is_side(node: fx.Node) -> bool:
    """Whether a node belongs to a side module."""
    return path_of(node).split(".")[0] == SIDE_NETWORK


def _block_path(path: str) -> str:
    """``features.2.conv.0.0`` -> ``features.2``; ``conv1`` -> ``conv1``."""
    names = path.split(".")
    start = next((index for index, name in enumerate(names) if name.isdigit()), None)
    if start is None:
        return names[0]
    return ".".join([*names[:start], *takewhile(str.isdigit, names[start:])])
