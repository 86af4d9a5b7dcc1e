"""Channels that are made and read within one block: they can be removed while the block's input and output stay."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from snugfit._chain.blocks import ModuleBlock, find_blocks
from snugfit.surgery.channels import ChannelGroup, find_groups


def hidden_groups(module: fx.GraphModule, input_shape: tuple[int, ...]) -> dict[int, tuple[ChannelGroup, ...]]:
    """Find the channels to prune for memory (Yoosefi et al., section V), by index of the block that hides them.

    A block's hidden channels are those that are made and read inside it: the expansion of an inverted residual, both
    inner widths of a bottleneck. A block that has none gets those that it reads from the block right before it, if
    nothing else reads them: the stem's output for MobileNetV2's block 1, whose ratio of 0.3 prunes the stem too; the
    previous convolution's output in plain stacks. What the last block reads stays: a new classifier is trained on it.

    Args:
        module: a traced network with torch's own layers (``use_stock``), possibly on meta.
        input_shape: channels, height, width of one image.

    Returns:
        Groups in order of execution, by index into ``find_blocks``; a block without any is left out, and each group
            appears in one block only.

    Raises:
        ModelError: the network does not run on such an input.
    """
    groups, blocks = find_groups(module, input_shape), find_blocks(module, input_shape)
    homes = _block_indices(blocks)
    inner: dict[int, list[ChannelGroup]] = {}
    crossing: dict[int, list[ChannelGroup]] = {}
    for group in groups:
        first, last = _span(group, homes)
        if first == last:
            inner.setdefault(last, []).append(group)
        elif first == last - 1 and last < len(blocks) - 1:
            crossing.setdefault(last, []).append(group)
    return {index: tuple(found) for index, found in sorted((crossing | inner).items())}


def blocks_of(
    module: fx.GraphModule, input_shape: tuple[int, ...], groups: Iterable[ChannelGroup]
) -> dict[str, tuple[int, int]]:
    """The first and the last block in which each group's channels lie, by the group's name."""
    homes = _block_indices(find_blocks(module, input_shape))
    return {group.name: _span(group, homes) for group in groups}


def _block_indices(blocks: tuple[ModuleBlock, ...]) -> dict[str, int]:
    """Index of the block that each layer belongs to."""
    return {str(node.target): index for index, block in enumerate(blocks) for node in block.nodes}


def _span(group: ChannelGroup, homes: dict[str, int]) -> tuple[int, int]:
    found = [homes[slot.tensor.rpartition(".")[0]] for slot in group.slots]
    return min(found), max(found)
