"""The cuts of a traced network into units (NeuroFlux decision 1)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, pairwise, takewhile
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from snugfit._chain.propagation import BATCH
from snugfit._chain.subgraph import computed_nodes
from snugfit._chain.tracing import LAYERS, Traced, is_torch_class, owner_of, path_of

_LAYER_FUNCTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}
_AVERAGES: tuple[type[nn.Module], ...] = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_AVERAGE_FUNCTIONS = {F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, torch.mean, "mean"}
_BLOCK_DEPTHWISE_CONVS = 4
"""A module with more depthwise convolutions than this is a whole network, not a block."""
_BLOCK_LAYERS = 8
"""A module around an attention with more layers than this is not a single encoder layer."""


@dataclass
class NodeSpan:
    """Consecutive nodes of a graph; only the last one's value is used outside."""

    nodes: list[fx.Node]
    name: str = field(default="")


def cut(traced: Traced, model: nn.Module) -> list[NodeSpan]:
    """Cut a graph into stretches that each contain a conv or linear layer; the last one is the head.

    A stretch without parameters joins the unit before it, except from the first operation that belongs to the next
    unit: one that removes the spatial axes, an adaptive or global pooling, or the norm of a pre-activation block.
    """
    nodes = computed_nodes(traced.graph)
    layers = {node for node in nodes if _is_layer(node, traced.attributes)}
    points = _cut_points(nodes, traced) - _inside_blocks(nodes, traced.attributes, model)
    edges = [0, *(index + 1 for index in sorted(points)), len(nodes)]
    atoms = [nodes[a:b] for a, b in pairwise(edges) if a < b]
    heavy = [index for index, atom in enumerate(atoms) if layers.intersection(atom)]
    if not heavy:
        return []
    starts = [0]
    for previous, following in pairwise(heavy):
        first_layer = next(node for node in atoms[following] if node in layers)
        last = atoms[previous][-1]
        opened = (i for i in range(previous + 1, following) if _opens(traced, atoms, i, last, first_layer))
        starts.append(next(opened, following))
    stretches = [NodeSpan(list(chain.from_iterable(atoms[a:b]))) for a, b in pairwise([*starts, len(atoms)])]
    _name(stretches, layers)
    return stretches


def _is_layer(node: fx.Node, attributes: dict[Any, Any]) -> bool:
    if node.op == "call_module":
        return any(isinstance(part, LAYERS) for part in attributes[node.target].modules())
    return node.op == "call_function" and node.target in _LAYER_FUNCTIONS


def _cut_points(nodes: list[fx.Node], traced: Traced) -> set[int]:
    """Indices after which the last computed node is the only live value."""
    position = {node: index for index, node in enumerate(nodes)}
    last_use = [max((position.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes]
    sources = [argument for node in nodes for argument in node.all_input_nodes if argument.op == "placeholder"]
    reach = max((position.get(user, len(nodes)) for node in sources for user in node.users), default=-1)
    points = set()
    for index, node in enumerate(nodes):
        shape = traced.shapes[node]
        if reach <= index < last_use[index] and shape is not None and shape[:1] == (BATCH,):
            points.add(index)
        reach = max(reach, last_use[index])
    return points


def _inside_blocks(nodes: list[fx.Node], attributes: dict[Any, Any], model: nn.Module) -> set[int]:
    """Indices after which a cut would split a block built on a depthwise convolution or on attention."""
    paths = [f"{path_of(node)}." for node in nodes]
    forbidden: set[int] = set()
    for block in (*_separable_blocks(model), *_attention_blocks(nodes, attributes, model)):
        inside = [index for index, path in enumerate(paths) if path.startswith(f"{block}.")]
        forbidden.update(range(inside[0], inside[-1]) if inside else ())
    return forbidden


def _separable_blocks(model: nn.Module) -> list[str]:
    """Innermost custom modules with a depthwise and at least one other convolution."""
    blocks = []
    for name, module in model.named_modules():
        convs = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
        depthwise = sum(conv.groups == conv.in_channels > 1 for conv in convs)
        if name and not is_torch_class(module) and len(convs) >= 2 and 1 <= depthwise <= _BLOCK_DEPTHWISE_CONVS:
            blocks.append(name)
    return [name for name in blocks if not any(other.startswith(f"{name}.") for other in blocks)]


def _attention_blocks(nodes: list[fx.Node], attributes: dict[Any, Any], model: nn.Module) -> list[str]:
    """Encoder layers: custom modules directly around one attention."""
    attentions = {
        path_of(node)
        for node in nodes
        if node.target is F.scaled_dot_product_attention
        or (node.op == "call_module" and isinstance(attributes[node.target], nn.MultiheadAttention))
    }
    holders = Counter(attention.rpartition(".")[0] for attention in attentions)
    return [name for name, count in holders.items() if name and count == 1 and _is_small(model.get_submodule(name))]


def _is_small(module: nn.Module) -> bool:
    layers = sum(isinstance(part, LAYERS) for part in module.modules())
    return not is_torch_class(module) and layers <= _BLOCK_LAYERS


def _opens(traced: Traced, atoms: list[list[fx.Node]], index: int, last: fx.Node, first_layer: fx.Node) -> bool:
    """Whether an atom between a unit's ``last`` node and the next ``first_layer`` belongs to the latter."""
    atom, attributes = atoms[index], traced.attributes
    before, after = (traced.shapes[node] or () for node in (atoms[index - 1][-1], atom[-1]))
    if len(after) < len(before):
        return True
    if any(_is_classifier_pooling(node, attributes, after) for node in atom):
        return True
    norm = next((node for node in atom if node.op == "call_module" and _has_state(attributes[node.target])), None)
    return norm is not None and _nearness(norm, first_layer) > _nearness(norm, last)


def _is_classifier_pooling(node: fx.Node, attributes: dict[Any, Any], after: tuple[int, ...]) -> bool:
    if node.op == "call_module":
        module = attributes[node.target]
        adaptive, average = type(module).__name__.startswith("Adaptive"), isinstance(module, _AVERAGES)
    else:
        name = getattr(node.target, "__name__", "")
        adaptive, average = name.startswith("adaptive_"), node.target in _AVERAGE_FUNCTIONS
    return adaptive or (average and all(size == 1 for size in after[2:]))


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _nearness(a: fx.Node, b: fx.Node) -> int:
    """Number of levels of the module tree that two nodes share."""
    return len(_common_path([owner_of(a), owner_of(b)]))


def _common_path(paths: list[str]) -> list[str]:
    """Names of the modules that contain all of the given paths, outermost first."""
    levels = zip(*(path.split(".") if path else [] for path in paths), strict=False)
    return [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]


def _name(stretches: list[NodeSpan], layers: set[fx.Node]) -> None:
    """Name each stretch by the outermost module that only it belongs to, or else by its first layer."""
    paths = [[path_of(node) for node in stretch.nodes] for stretch in stretches]
    taken: Counter[str] = Counter()
    for index, stretch in enumerate(stretches):
        others = [f"{path}." for i, group in enumerate(paths) if i != index for path in group]
        of_layers = [path_of(node) for node in stretch.nodes if node in layers]
        within = _common_path(of_layers)
        holders = (".".join(within[: depth + 1]) for depth in range(len(within)))
        own = (name for name in holders if not any(other.startswith(f"{name}.") for other in others))
        stretch.name = next(own, of_layers[0] or "unit")
        taken[stretch.name] += 1
        if taken[stretch.name] > 1:
            stretch.name += f"_{taken[stretch.name]}"
