"""The block of every operator of a network, and the operators of its side module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from snugfit._chain import find_blocks
from snugfit._chain.blocks import SIDE_NETWORK
from snugfit._chain.tracing import owner_of


@dataclass(frozen=True)
class Members:
    """Operators and their blocks.

    Attributes:
        names: of the blocks.
        block: number of the block of every operator.
        side: those operators that belong to a side module.
        entries: for each block, the operator whose output enters it, or the network's input.
        residual: numbers of the blocks whose input is read in more than one place, not counting its side module.
    """

    names: tuple[str, ...]
    block: dict[fx.Node, int]
    side: frozenset[fx.Node]
    entries: tuple[fx.Node, ...]
    residual: frozenset[int]


def find_members(module: fx.GraphModule, input_shape: tuple[int, ...]) -> Members:
    """Find the blocks of a traced network, numbered as by :func:`snugfit._chain.find_blocks`.

    Args:
        module: a traced network, with or without a side network.
        input_shape: channels, height, width of one image.
    """
    blocks = find_blocks(module, input_shape)
    block = {node: number for number, part in enumerate(blocks) for node in part.nodes}
    side = frozenset(node for node in block if _is_beside(node))
    return Members(
        names=tuple(part.name for part in blocks),
        block=block,
        side=side,
        entries=tuple(part.entry for part in blocks),
        residual=frozenset(
            number for number, part in enumerate(blocks) if len(part.entry.users.keys() & (set(part.nodes) - side)) > 1
        ),
    )


def _is_beside(node: fx.Node) -> bool:
    path = str(node.target) if node.op == "call_module" else owner_of(node)
    return path.partition(".")[0] == SIDE_NETWORK
