"""Importance of each channel in a trained network (Yoosefi et al., section V, step 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from snugfit._chain.propagation import in_mode
from snugfit._chain.subgraph import computed_nodes, input_node, subgraph_module
from snugfit.errors import ModelError, UsageError
from snugfit.surgery.channels import BATCHNORMS, ELEMENTWISE, ChannelGroup, Slot, channel_norms, width

Measure = Literal["activation", "filter"]


def channel_importance(
    module: fx.GraphModule,
    groups: Iterable[ChannelGroup],
    batches: Iterable[Tensor] = (),
    *,
    by: Measure = "activation",
    micro_batch: int = 8,
) -> dict[str, Tensor]:
    """Score every channel of some groups; higher means more important.

    Where several layers make the channels of a group (an expansion and the depthwise convolution behind it), each
    layer's squared norms are divided by the layer's sum, so that layers have equal weight.

    Args:
        module: a traced network; it runs in evaluation mode, without a graph, up to the last of these channels.
        groups: from ``hidden_groups`` or ``find_groups``.
        batches: images of a calibration set, (B, C, H, W) each; only activations need them.
        by: ``"activation"``: l2 norm of the channel over all images, after the layer's BatchNorm and activation
            (the paper's); ``"filter"``: l2 norm of the weights that make the channel. BatchNorm's own weights take no
                part: they scale a channel, but do not say what it contains.
        micro_batch: images run at once.

    Returns:
        Scores in float64 on the CPU, (channels,), by the group's name.

    Raises:
        UsageError: another measure, or no images.
        ModelError: activations are infinite or not a number.
    """
    groups = list(groups)
    if by == "filter":
        tensors, makers = module.state_dict(), _makers(module, groups)
        squares = {layer: channel_norms(tensors[slot.tensor], slot).double().cpu() ** 2 for layer, slot in makers}
    elif by == "activation":
        squares = _activation_squares(module, groups, batches, micro_batch)
    else:
        raise UsageError(f"channels are measured by 'activation' or 'filter', not by '{by}'.")
    return {group.name: _score([squares[layer] for layer, _ in _makers(module, [group])]) for group in groups}


def most_important(importance: Mapping[str, Tensor], widths: Mapping[str, int]) -> dict[str, list[int]]:
    """Select the channels of each group with the highest scores (channels,), as many as ``widths`` says.

    The result is for ``remove_channels``.

    Raises:
        ModelError: a width of no channel.
        UsageError: a width above the number of channels, or of a group without scores.
    """
    kept = {}
    for name, count in widths.items():
        if name not in importance:
            raise UsageError(f"layer {name} has no scores.")
        scores = importance[name]
        if count < 1:
            raise ModelError(f"no channel of layer {name} would be left of {len(scores)}; keep at least one.")
        if count > len(scores):
            raise UsageError(f"layer {name} has {len(scores)} channels, not {count}.")
        kept[name] = sorted(scores.argsort(descending=True, stable=True)[:count].tolist())
    return kept


def _makers(module: nn.Module, groups: Iterable[ChannelGroup]) -> list[tuple[str, Slot]]:
    """Convolutions and linear layers that make the groups' channels, depthwise ones included, with their slot."""
    tensors = module.state_dict()
    slots = [slot for group in groups for slot in group.producers if tensors[slot.tensor].dim() > 1]
    return [(slot.tensor.rpartition(".")[0], slot) for slot in slots]


def _score(squares: list[Tensor]) -> Tensor:
    tiny = torch.finfo(torch.float64).tiny
    return torch.stack([layer / layer.sum().clamp_min(tiny) for layer in squares]).sum(0).sqrt()


def _activation_squares(
    module: fx.GraphModule, groups: list[ChannelGroup], batches: Iterable[Tensor], micro_batch: int
) -> dict[str, Tensor]:
    """Sum of squares of each channel over all images (B, C, H, W), (channels,) by layer."""
    layers = {layer: width(module, group) for group in groups for layer, _ in _makers(module, [group])}
    if not layers:
        return {}
    sums = {layer: torch.zeros(channels, dtype=torch.float64) for layer, channels in layers.items()}
    interpreter, images = _Squares(module, sums), 0
    with in_mode(module), torch.no_grad():
        for batch in batches:
            for micro in torch.split(batch, micro_batch):
                interpreter.run(micro)
                images += len(micro)
    if not images:
        raise UsageError("channels are measured by their activations on images; pass some, or measure by 'filter'.")
    broken = next((layer for layer, total in sums.items() if not total.isfinite().all()), None)
    if broken is not None:
        raise ModelError(f"the activations behind layer {broken} are infinite or not a number.")
    return sums


def _end(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The last of the BatchNorm and activations that follow a layer directly."""
    while len(node.users) == 1 and _is_activation(module, next(iter(node.users))):
        node = next(iter(node.users))
    return node


def _is_activation(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_module":
        return node.target in ELEMENTWISE
    kinds = type(module.get_submodule(str(node.target))).__mro__  # lean layers are torch's own, too
    return any(kind in BATCHNORMS or kind in ELEMENTWISE for kind in kinds)


class _Squares(fx.Interpreter):
    """Runs a network up to the last of some layers and adds the squares behind each to ``sums``, (channels,) each."""

    def __init__(self, module: fx.GraphModule, sums: dict[str, Tensor]) -> None:
        nodes = computed_nodes(module.graph)
        ends = {_end(module, node): str(node.target) for node in nodes if str(node.target) in sums}
        last = max(index for index, node in enumerate(nodes) if node in ends)
        part = subgraph_module(module, nodes[: last + 1], input_node(module.graph))
        super().__init__(part)
        copies = zip(computed_nodes(part.graph), nodes, strict=False)
        self.sums, self.points = sums, {copy: ends[node] for copy, node in copies if node in ends}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.points:
            layer = self.points[n]
            linear = isinstance(self.module.get_submodule(layer), nn.Linear)
            channels = value.dim() - 1 if linear else 1
            norms = torch.linalg.vector_norm(value, dim=[dim for dim in range(value.dim()) if dim != channels])
            self.sums[layer] += norms.double().square().cpu()
        return value
