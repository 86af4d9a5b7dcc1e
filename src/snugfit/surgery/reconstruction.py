"""The channels to keep so that the layers that read them can best reproduce their outputs.

The paper ranks channels by the size of their activations (Yoosefi et al., section V), which keeps large redundant
channels and drops small unique ones. Here the layer that reads a group decides: channels are removed one by one, each
time the one that the others replace best by least squares, as in Optimal Brain Surgeon (Hassibi and Stork, 1993) for
the weights of one layer. ``distil`` then gives the layer these least-squares weights.

Shapes: C channels, F features of one channel that an output reads (its kernel's pixels), O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from snugfit._chain.subgraph import computed_nodes, input_node, subgraph_module
from snugfit.errors import UsageError
from snugfit.surgery.channels import ChannelGroup, width
from snugfit.surgery.importance import channel_importance, evaluating, most_important
from snugfit.surgery.regression import Regression

RIDGE = 1e-4
"""Added to the inputs' second moments, in units of their mean, so that constant channels cause no division by zero."""


def channels_by_reconstruction(
    module: fx.GraphModule,
    groups: Iterable[ChannelGroup],
    widths: Mapping[str, int],
    batches: Callable[[], Iterable[Tensor]],
    *,
    micro_batch: int = 8,
) -> dict[str, list[int]]:
    """Select the channels of each group from which its readers are reproduced best, for ``remove_channels``.

    Args:
        module: a traced network; it runs in evaluation mode, without a graph, up to what reads a group.
        groups: from ``hidden_groups``.
        widths: number of channels to keep, by the group's name.
        batches: images of a calibration set, (B, C, H, W) each; read once per group.
        micro_batch: images run at once.

    Returns:
        Sorted channels by the group's name. A group without a reader that ``Regression`` supports is ranked by its
        activations.

    Raises:
        UsageError: there are no images.
    """
    kept, others = {}, []
    with evaluating(module), torch.no_grad():
        for group in (group for group in groups if group.name in widths):
            readers = _readers(module, group)
            if readers:
                sums = _moments(module, readers, batches(), micro_batch)
                kept[group.name] = eliminate_channels(sums, width(module, group), widths[group.name])
            else:
                others.append(group)
    scores = channel_importance(module, others, batches(), micro_batch=micro_batch) if others else {}
    return kept | most_important(scores, {group.name: widths[group.name] for group in others})


def eliminate_channels(sums: Iterable[tuple[Tensor, Tensor]], channels: int, keep: int) -> list[int]:
    """Remove channels one by one, each time the one that the rest replace best; returns the rest, sorted.

    Args:
        sums: for every reader, its inputs' second moments, (C*F, C*F), and its weights, (C*F, O), both float64.
        channels: C.
        keep: number of channels to keep.
    """
    readers = [_Reader(moments, weights, channels) for moments, weights in sums]
    alive = torch.ones(channels, dtype=torch.bool)
    for _ in range(channels - keep):
        costs = torch.stack([reader.costs() for reader in readers]).sum(0)
        worst = int(costs.masked_fill(~alive, torch.inf).argmin())
        alive[worst] = False
        for reader in readers:
            reader.drop(worst)
    return [int(channel) for channel in alive.nonzero()]


class _Reader:
    """One layer's least squares as inputs are removed; the rows of removed inputs are zero."""

    def __init__(self, moments: Tensor, weights: Tensor, channels: int) -> None:
        self.features = len(weights) // channels
        penalty = RIDGE * moments.diagonal().mean().clamp_min(1e-30)
        self.inverse = torch.linalg.inv(moments + penalty * torch.eye(len(moments), dtype=moments.dtype))
        self.weights = weights.clone()
        self.total = torch.einsum("fo,fg,go->", weights, moments, weights).clamp_min(1e-30)
        self.gone = torch.zeros(channels, dtype=torch.bool)

    def costs(self) -> Tensor:
        """Relative squared error, (C,), that removing each channel adds once the others replace it."""
        count, size = len(self.gone), self.features
        own = self.weights.view(count, size, -1)
        blocks = self.inverse.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        blocks = blocks.masked_fill(self.gone[:, None, None], 0) + torch.diag_embed(
            self.gone[:, None].expand(count, size).to(blocks)
        )
        errors: Tensor = (own * torch.linalg.solve(blocks, own)).sum((1, 2))
        return errors / self.total

    def drop(self, channel: int) -> None:
        """Remove a channel and let the others replace it."""
        at = slice(channel * self.features, (channel + 1) * self.features)
        shares = torch.linalg.solve(self.inverse[at, at], self.inverse[at]).T
        self.weights -= shares @ self.weights[at]
        self.inverse -= shares @ self.inverse[at]
        self.weights[at], self.inverse[at], self.inverse[:, at] = 0, 0, 0
        self.gone[channel] = True


def _readers(module: fx.GraphModule, group: ChannelGroup) -> list[fx.Node]:
    """Nodes of the layers that mix a group's channels into others; empty if one of them cannot be solved for."""
    names = {slot.tensor.rpartition(".")[0] for slot in group.readers}
    nodes = [node for node in module.graph.nodes if node.op == "call_module" and str(node.target) in names]
    served = all(Regression.serves(module.get_submodule(str(node.target))) for node in nodes)
    return nodes if served and len(nodes) == len(names) else []


def _moments(
    module: fx.GraphModule, readers: list[fx.Node], batches: Iterable[Tensor], micro_batch: int
) -> list[tuple[Tensor, Tensor]]:
    """Centred second moments (C*F, C*F) of layers' inputs, and their weights (C*F, O), in float64 on the CPU."""
    nodes = computed_nodes(module.graph)
    entry = input_node(module.graph)
    part = subgraph_module(module, nodes[: max(nodes.index(node) for node in readers) + 1], entry)
    layers = [module.get_submodule(str(node.target)) for node in readers]
    found = [Regression(layer) for layer in layers if isinstance(layer, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(_adds_to(each)) for layer, each in zip(layers, found, strict=True)]
    try:
        for batch in batches:
            for micro in torch.split(batch, micro_batch):
                part(micro)
    finally:
        for hook in hooks:
            hook.remove()
    if not all(each.count for each in found):
        raise UsageError("channels are chosen by what can be rebuilt on images; pass some, or choose by 'filter'.")
    return [(each.moments.cpu(), each.layer.weight.detach().flatten(1).T.double().cpu()) for each in found]


def _adds_to(regression: Regression) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        regression.add(inputs[0], output)

    return add
