"""Copies of a network that take only the memory of what differs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn

from snugfit._chain.blocks import find_blocks
from snugfit.surgery.channels import ChannelGroup
from snugfit.surgery.hidden import blocks_of
from snugfit.surgery.reshape import remove_channels


def narrowed_meta_copy(
    module: fx.GraphModule, groups: Iterable[ChannelGroup], widths: Mapping[str, int]
) -> fx.GraphModule:
    """A copy of a network on the meta device with other widths, to predict its memory without its weights.

    Raises:
        ModelError: a width is below 1.
        UsageError: an unknown group, or a width above the number of channels.
    """
    stand_ins: dict[int, torch.Tensor] = {}
    for _, parameter in module.named_parameters():
        empty = torch.empty_like(parameter, device="meta")
        stand_ins[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for _, buffer in module.named_buffers():
        stand_ins[id(buffer)] = torch.empty_like(buffer, device="meta")
    twin: fx.GraphModule = copy.deepcopy(module, stand_ins)
    remove_channels(twin, groups, {name: range(channels) for name, channels in widths.items()})
    return twin


def copy_for_pruning(
    module: fx.GraphModule,
    input_shape: tuple[int, ...],
    groups: Iterable[ChannelGroup],
) -> fx.GraphModule:
    """A copy of a network to prune and to ``distil`` from the unchanged original.

    Weights of blocks without channels of the groups are shared: a change in one network changes both.
    """
    spans = blocks_of(module, input_shape, groups).values()
    own = {block for first, last in spans for block in range(first, last + 1)}
    blocks = [block for index, block in enumerate(find_blocks(module, input_shape)) if index in own]
    copied = {id(tensor) for block in blocks for layer in block.layers(module) for tensor in _tensors(layer)}
    shared = {id(tensor): tensor for tensor in _tensors(module) if id(tensor) not in copied}
    twin: fx.GraphModule = copy.deepcopy(module, dict(shared))
    return twin


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
