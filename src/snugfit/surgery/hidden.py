"""Channels within single blocks, and copies of a network to remove them from."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn

from snugfit._chain.blocks import ModuleBlock, find_blocks
from snugfit._chain.store import copy_empty
from snugfit.surgery.channels import ChannelGroup, find_groups
from snugfit.surgery.reshape import remove_channels


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
        Groups in order of execution, by index into ``find_blocks``, without blocks that have none. Each group appears
            in one block only.

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


def narrowed_meta_copy(
    module: fx.GraphModule, groups: Iterable[ChannelGroup], widths: Mapping[str, int]
) -> fx.GraphModule:
    """A copy of a network on the meta device with other widths, to predict its memory without its weights.

    Raises:
        ModelError: a width is below 1.
        UsageError: an unknown group, or a width above the number of channels.
    """
    narrowed = copy_empty(module, module, "meta")
    remove_channels(narrowed, groups, {name: range(channels) for name, channels in widths.items()})
    return narrowed


def copy_for_pruning(
    module: fx.GraphModule, input_shape: tuple[int, ...], groups: Iterable[ChannelGroup]
) -> fx.GraphModule:
    """A copy of a network to prune and to ``distil`` from the unchanged original.

    Weights of blocks without channels of the groups are shared: a change in one network changes both.
    """
    spans = blocks_of(module, input_shape, groups).values()
    own = {block for first, last in spans for block in range(first, last + 1)}
    blocks = [block for index, block in enumerate(find_blocks(module, input_shape)) if index in own]
    copied = {id(tensor) for block in blocks for layer in block.layers(module) for tensor in _tensors(layer)}
    shared = {id(tensor): tensor for tensor in _tensors(module) if id(tensor) not in copied}
    copied_network: fx.GraphModule = copy.deepcopy(module, dict(shared))
    return copied_network


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
