"""The channels to keep so that the layers that read them can best reproduce their outputs.

The paper ranks channels by the size of their activations (Yoosefi et al., section V), which keeps large redundant
channels and drops small unique ones. Here the layer that reads a group decides: channels are removed one by one, each
time the one that the others replace best by least squares, as in Optimal Brain Surgeon (Hassibi and Stork, 1993) for
the weights of one layer. ``distil`` then gives the layer these least-squares weights.

Shapes: C channels, F features of one channel that an output reads (its kernel's pixels), O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from snugfit._chain.propagation import in_mode
from snugfit._chain.subgraph import computed_nodes, input_node, subgraph_module
from snugfit.errors import UsageError
from snugfit.surgery.channels import ChannelGroup, width
from snugfit.surgery.importance import channel_importance, most_important

RIDGE = 1e-4
"""Added to the inputs' second moments, in units of their mean, so that constant channels cause no division by zero."""
LARGEST = 2048
"""Largest number of inputs per output (channels times kernel) that is solved for: its normal equations are 32 MiB."""

_POSITIONS = 512
"""Pixels sampled from each image, because neighbours are similar."""


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
        Sorted channels by the group's name; by activations if ``Regression`` does not support a reader.

    Raises:
        UsageError: there are no images.
    """
    kept, others = {}, []
    with in_mode(module), torch.no_grad():
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
    """Remove channels one by one, each time the one that the rest replace best; returns the sorted rest.

    ``sums`` are, for every reader, its inputs' second moments, (C*F, C*F), and its weights, (C*F, O), both float64.
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
    last = max(nodes.index(node) for node in readers)
    part = subgraph_module(module, nodes[: last + 1], input_node(module.graph))
    layers = [module.get_submodule(str(node.target)) for node in readers]
    found = [Regression(layer) for layer in layers if isinstance(layer, (nn.Conv2d, nn.Linear))]
    hooks = [
        each.layer.register_forward_hook(lambda _, inputs, output, each=each: each.add(inputs[0], output))
        for each in found
    ]
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


class Regression:
    """Least squares for one convolution or linear layer, added up image by image in float64."""

    def __init__(self, layer: nn.Conv2d | nn.Linear) -> None:
        self.layer = layer
        outputs, features = layer.weight.shape[0], layer.weight[0].numel()
        sizes = ((features, features), (features, outputs), (features,), (outputs,))
        zeros = [torch.zeros(size, dtype=torch.float64, device=layer.weight.device) for size in sizes]
        self.products, self.targets, self.input_sum, self.target_sum = zeros
        self.count = 0
        self._generator = torch.Generator().manual_seed(0)

    @staticmethod
    def serves(layer: nn.Module) -> bool:
        """Whether a layer's kind and size are supported."""
        if isinstance(layer, nn.Conv2d):
            plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
            return plain and layer.weight[0].numel() <= LARGEST
        return isinstance(layer, nn.Linear) and layer.in_features <= LARGEST

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Add the layer's inputs and target outputs, both (B, ...) as in its forward pass."""
        for image, target in zip(inputs, targets, strict=True):
            x, y = (rows.double() for rows in self._rows(image, target))
            self.products.addmm_(x.T, x)
            self.targets.addmm_(x.T, y)
            self.input_sum += x.sum(0)
            self.target_sum += y.sum(0)
            self.count += len(x)

    @property
    def moments(self) -> Tensor:
        """Summed products of the centred inputs, (features, features)."""
        return self.products - torch.outer(self.input_sum, self.input_sum) / self.count

    def solve(self, ridge: float, intercept: bool) -> tuple[Tensor, Tensor]:
        """Compute the weight, in the layer's shape, and what to add to its outputs, (outputs,): zero without intercept.

        The ridge weighs the squared distance from the current weight, in units of the inputs' mean square.
        """
        before = self.layer.weight.detach().flatten(1).T.double()
        scale = 1.0 / self.count if intercept else 0.0
        products = self.moments if intercept else self.products
        targets = self.targets - scale * torch.outer(self.input_sum, self.target_sum)
        penalty = ridge * products.diagonal().mean().clamp_min(1e-30)
        penalised = products + penalty * torch.eye(len(products), dtype=products.dtype, device=products.device)
        weight = before + torch.linalg.solve(penalised, targets - products @ before)
        shift = scale * (self.target_sum - self.input_sum @ weight)
        return weight.T.reshape(self.layer.weight.shape).to(self.layer.weight), shift.to(self.layer.weight)

    def _rows(self, image: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of single outputs, (N, features), and those outputs, (N, outputs)."""
        if isinstance(self.layer, nn.Linear):
            return image.reshape(-1, image.shape[-1]), target.reshape(-1, target.shape[-1])
        height, width = target.shape[1:]
        at = torch.randperm(height * width, generator=self._generator)[:_POSITIONS].to(image.device)
        rows, columns = at // width, at % width
        (stride, dilation, kernel) = (self.layer.stride, self.layer.dilation, self.layer.kernel_size)
        top, left = (int(padding) for padding in self.layer.padding)
        padded = F.pad(image, (left, left, top, top))
        taps = [torch.arange(k, device=image.device) * d for k, d in zip(kernel, dilation, strict=True)]
        down = (rows * stride[0])[:, None, None] + taps[0][:, None]
        right = (columns * stride[1])[:, None, None] + taps[1]
        patches = padded[:, down, right]  # (C, N, k, k)
        return patches.transpose(0, 1).flatten(1), target[:, rows, columns].T
