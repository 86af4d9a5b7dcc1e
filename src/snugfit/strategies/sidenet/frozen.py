"""Analysis of a frozen network without running it: blocks with large feature maps, and prunable channels."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import chain as joined
from typing import cast

import numpy as np
from torch import fx, nn

from snugfit import surgery
from snugfit._chain import Chain, ModuleBlock, classifier_names, find_blocks
from snugfit._chain.blocks import SIDE_NETWORK
from snugfit.errors import ModelError
from snugfit.lean import run_per_sample
from snugfit.memory.activation import ActivationMemory
from snugfit.profiling.activation import analytic_activation_memory
from snugfit.strategies.sidenet.config import SidenetScheme, prune_ratio

SIDE_PREFIX = f"{SIDE_NETWORK}."
"""Prefix of the names of the side network's tensors."""
MIN_KEPT_SHARE = 1 / 8
"""Share of a group's channels that always stay."""
MAX_BLOCK_RATIO = 8
"""A block gains nothing from running image by image if its memory is below that of the largest by more than this."""


class FrozenNetwork:
    """A network that will be frozen, on the meta device; its properties are computed on first use.

    ``prune`` is ``on`` for computed ratios, or a ratio for every block with large feature maps.
    """

    def __init__(self, chain: Chain, scheme: SidenetScheme, side_width: float, prune: str) -> None:
        self.chain, self.scheme, self.side_width, self.ratio = chain, scheme, side_width, prune_ratio(prune)
        self.input_shape = chain.input_shape

    @cached_property
    def classifier(self) -> frozenset[str]:
        """Names of the classifier's tensors."""
        return frozenset(classifier_names(self.chain))

    @cached_property
    def backbone(self) -> fx.GraphModule:
        """The network before a side network is added or channels are removed."""
        return cast(fx.GraphModule, self.chain.to_module())

    def memory(self, backbone: fx.GraphModule) -> ActivationMemory:
        """Activation memory of an image by the paper's rule, with the side network added to a backbone."""
        network = backbone
        if self.side_width:
            network = surgery.attach_side_network(backbone, self.input_shape, width=self.side_width)
        trains = self.classifier | {name for name, _ in network.named_parameters() if name.startswith(SIDE_PREFIX)}
        return analytic_activation_memory(network, self.input_shape, trains)

    @cached_property
    def unpruned(self) -> ActivationMemory:
        """Activation memory of the unpruned network."""
        return self.memory(self.backbone)

    @cached_property
    def per_sample_blocks(self) -> tuple[int, ...]:
        """Blocks to run image by image: their peaks exceed all that the backward pass keeps, and none is small."""
        module = cast(fx.GraphModule, copy.deepcopy(self.chain).to_module())
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        blocks, most = find_blocks(module, self.input_shape), max(b.temporary_bytes for b in self.unpruned.blocks)
        return tuple(
            index
            for index in self.unpruned.sensitive()
            if self.unpruned.blocks[index].temporary_bytes * MAX_BLOCK_RATIO > most
            and not _layers(blocks[index].nodes) & {name.rpartition(".")[0] for name in self.classifier}
            and not any(isinstance(each, nn.Dropout) for each in blocks[index].layers(module))
            and _runs_by_sample(module, blocks[index])
        )

    @cached_property
    def groups(self) -> tuple[surgery.ChannelGroup, ...]:
        """Groups of channels that may be removed, in order of execution."""
        return tuple(joined.from_iterable(surgery.hidden_groups(self.backbone, self.input_shape).values()))

    @cached_property
    def channels(self) -> dict[str, int]:
        """Number of channels of each of these groups."""
        return {group.name: surgery.width(self.backbone, group) for group in self.groups}

    @cached_property
    def widths(self) -> dict[str, int]:
        """Number of channels that each pruned group keeps (Yoosefi et al., section V).

        Raises:
            ModelError: there is nothing to prune, or a ratio would empty a layer.
        """
        if self.ratio is None:
            found = surgery.widest_widths(self._prunable, self._carriers, self._temporary, self.target_bytes)
        else:
            found = {name: surgery.kept_width(count, self.ratio, name) for name, count in self._prunable.items()}
        if not found:
            raise ModelError(
                "--prune: there is nothing to prune: no block's feature maps need more than the backward pass keeps."
            )
        return found

    @cached_property
    def target_bytes(self) -> int:
        """Target bytes of every block: what the backward pass keeps of the whole network (section V).

        The target is larger if a block could not reach it with :data:`MIN_KEPT_SHARE` of its channels, since that block
        would set the peak.
        """
        least = {name: math.ceil(count * MIN_KEPT_SHARE) for name, count in self._prunable.items()}
        reached = self._temporary(least)
        return max([self.unpruned.cumulative_bytes, *(reached[block] for block in self.unpruned.sensitive())])

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        return surgery.blocks_of(self.backbone, self.input_shape, self.groups)

    @cached_property
    def _prunable(self) -> dict[str, int]:
        """Channels of the groups in blocks with large feature maps."""
        large = set(self.unpruned.sensitive())
        return {name: self.channels[name] for name, (first, last) in self._spans.items() if large & {first, last}}

    @property
    def _carriers(self) -> dict[int, list[str]]:
        return {
            block: [name for name in self._prunable if block in self._spans[name]]
            for block in self.unpruned.sensitive()
        }

    def _layers(self, widths: Mapping[str, int]) -> list[np.ndarray]:
        """Temporary bytes of every block's layers at some widths: (layers,) for each block."""
        narrowed = surgery.narrowed_meta_copy(self.backbone, self.groups, widths)
        blocks = analytic_activation_memory(narrowed, self.input_shape, self.classifier).blocks
        return [np.array([layer.temporary_bytes for layer in block.layers]) for block in blocks]

    @cached_property
    def _per_channel(self) -> tuple[list[np.ndarray], dict[str, list[np.ndarray]]]:
        """Temporary bytes of every block's layers in the full network, and per channel of each group: (layers,) each.

        The bytes of a layer are a sum over its input and output channels. A network with one channel of a group left
        therefore gives the bytes per channel: one evaluation per group instead of one per choice of widths.
        """
        full = self._layers({})
        each = {
            name: [(most - least) // (count - 1) for most, least in zip(full, self._layers({name: 1}), strict=True)]
            for name, count in self._prunable.items()
            if count > 1
        }
        return full, each

    def _temporary(self, widths: Mapping[str, int]) -> list[int]:
        """Temporary memory of each block (equation 5) at some widths."""
        full, each = self._per_channel
        gone = {name: self.channels[name] - count for name, count in widths.items() if name in each}
        saved = [sum(each[name][block] * count for name, count in gone.items()) for block in range(len(full))]
        return [int((most - less).max()) for most, less in zip(full, saved, strict=True)]

    @property
    def can_prune(self) -> bool:
        """Whether there is something to prune, and no layer would become empty."""
        try:
            return bool(self.widths)
        except ModelError:
            return False

    @property
    def pruned_groups(self) -> tuple[surgery.ChannelGroup, ...]:
        """The groups that lose channels."""
        return tuple(group for group in self.groups if group.name in self.widths)

    def prune(self, module: nn.Module) -> None:
        """Remove the first channels of each pruned group, in place; for purposes that depend on widths alone."""
        surgery.remove_channels(module, self.groups, {name: range(count) for name, count in self.widths.items()})

    @property
    def width_changes(self) -> dict[str, tuple[int, int]]:
        """Channels before and after, by group."""
        return {name: (self.channels[name], count) for name, count in self.widths.items()}

    def pruned_names(self, module: fx.GraphModule) -> set[str]:
        """Names of the tensors of all pruned blocks, which retraining may change."""
        spans = surgery.blocks_of(module, self.input_shape, self.pruned_groups).values()
        blocks = find_blocks(module, self.input_shape)
        inside = [blocks[index] for first, last in spans for index in range(first, last + 1)]
        layers = {layer for block in inside for layer in _layers(block.nodes)}
        return {name for name in module.state_dict() if name.rpartition(".")[0] in layers}

    def find_per_sample_blocks(self, module: fx.GraphModule) -> list[ModuleBlock]:
        """The blocks of a copy of this network that run image by image."""
        blocks = find_blocks(module, self.input_shape)
        return [blocks[index] for index in self.per_sample_blocks]


def _layers(nodes: Iterable[fx.Node]) -> set[str]:
    return {str(node.target) for node in nodes if node.op == "call_module"}


def _runs_by_sample(module: fx.GraphModule, block: ModuleBlock) -> bool:
    """Whether a block of a frozen network can run image by image."""
    try:
        run_per_sample(module, {block.name: block.nodes})
    except ModelError:
        return False
    run_per_sample(module, {})
    return True
