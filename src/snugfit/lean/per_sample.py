"""Frozen blocks of a network that run one sample at a time, so that their temporary memory is that of one sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from snugfit.errors import ModelError, UsageError

_RUNNERS = "blocks_by_sample"
"""Path of the modules that run blocks sample by sample; they are not in the state dict."""
_WHOLE = "graph_of_whole_batches"
"""Key of the network's own graph in its ``meta``."""
_READ_ONLY = (_ConvNd, nn.Linear, _NormBase, nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd)


def run_per_sample(module: fx.GraphModule, blocks: Mapping[str, Sequence[fx.Node]]) -> None:
    """Make these blocks of a network run one sample at a time, and all others whole batches again, in place.

    In a frozen block in evaluation mode samples are independent, so outputs and gradients do not change. Without a
    gradient, a block's peak is its input, its output, and the temporary memory of one sample. If a gradient passes
    through to the block's input, saved tensors are kept per sample (few with :func:`snugfit.lean.use_lean`), and the
    backward pass runs sample by sample.

    State dict, layers and hooks stay; ``use_lean`` and ``train()`` reach the layers as before. Undo it with
    ``run_per_sample(module, {})`` before the network is traced or cut, or its graph is changed.

    Args:
        module: a traced network; side modules are allowed.
        blocks: for each, a name for messages, and its nodes in order, of the module's graph or of that of the backbone
            that side modules were attached to; none if empty.

    Raises:
        ModelError: a block is not part of the network, is entered or left by more than one tensor, has trained
            parameters, reads tensors that belong to no layer, or has a norm without running statistics.
    """
    whole = graph_of(module)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(whole, copies))
    own = {node.name: node for node in whole.nodes}
    runners: dict[str, nn.Module] = {}
    checked = [(name, *_checked(module, name, nodes, own)) for name, nodes in blocks.items()]
    for title, nodes, entry in _joined(checked, whole):
        name = f"{_RUNNERS}.{title.replace('.', '_').replace(' ', '_')}"
        runners[name] = PerSample(title, _body(module, nodes, entry), _reads_only(module, nodes, entry))
        copies[nodes[-1]] = _replace(graph, [copies[node] for node in nodes], copies[entry], name)
    if hasattr(module, _RUNNERS):
        delattr(module, _RUNNERS)
    for name, runner in runners.items():
        module.add_submodule(name, runner)
    module.meta.pop(_WHOLE, None)
    if runners:
        module.meta[_WHOLE] = whole
    module.graph = graph


def graph_of(module: fx.GraphModule) -> fx.Graph:
    """A network's graph for whole batches, whichever blocks run by sample."""
    graph: fx.Graph = module.meta.get(_WHOLE, module.graph)
    return graph


class PerSample(nn.Module):
    """A module that runs a block sample by sample.

    It gets a copy of each sample unless it ``reads_only``.
    """

    def __init__(self, name: str, body: fx.GraphModule, reads_only: bool) -> None:
        super().__init__()
        self.name, self.reads_only = name, reads_only
        self.__dict__["body"] = body  # its layers belong to the network and are not sub-modules of this module

    def forward(self, inputs: Tensor) -> Tensor:
        """Feature map (B, C, H, W) to the block's output.

        Raises:
            ModelError: a parameter of the block is trained, or a norm or dropout is in training mode.
        """
        body: fx.GraphModule = self.__dict__["body"]
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in body.parameters()):
            raise ModelError(_trains(self.name))
        for layer in body.modules():
            if layer.training and isinstance(layer, (_NormBase, _DropoutNd)):
                raise ModelError(
                    f"block {self.name} runs sample by sample and holds a {type(layer).__name__} in training mode, "
                    "which would see single samples; call eval() on it, or leave the block out of run_per_sample."
                )
        prepare: Callable[[Tensor], Tensor] = Tensor.detach if self.reads_only else Tensor.clone
        if len(inputs) < 2 or inputs.dim() < 2:
            whole: Tensor = body(inputs if self.reads_only else inputs.clone())
            return whole
        if torch.is_grad_enabled() and inputs.requires_grad:
            found: Tensor = _Through.apply(inputs, body, prepare)
            return found
        with torch.no_grad():
            return _collected(inputs, lambda sample: body(prepare(sample)))


class _Through(torch.autograd.Function):
    """A frozen block, sample by sample, through which a gradient (B, C, H, W) passes to its input.

    Every sample has its own autograd graph, held by its two ends. Inputs and outputs are kept only where an operator in
    between keeps them.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, body: fx.GraphModule, prepare: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.ends, ctx.layout = [], _layout(inputs)
        token = torch.empty(0, dtype=inputs.dtype, device=inputs.device, requires_grad=True)

        def run(sample: Tensor) -> Tensor:
            with torch.enable_grad():
                entry = _Entry.apply(token, sample, prepare)
                start = get_gradient_edge(entry)  # before the block may overwrite what it is given
                output = body(entry)
                ctx.ends.append((start, get_gradient_edge(output)))
                detached: Tensor = output.detach()
                return detached

        return _collected(inputs, run)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ends: list[tuple[GradientEdge, GradientEdge]] = ctx.ends
        if len(ends) != len(gradient):
            raise UsageError("a second backward pass through blocks that run sample by sample: run forward again.")
        to_inputs = ctx.layout(len(gradient))
        for index in reversed(range(len(gradient))):
            entry, output = ends.pop()
            (found,) = torch.autograd.grad([output], [entry], [gradient[index : index + 1]])
            to_inputs[index] = found[0]
        return to_inputs, None, None


class _Entry(torch.autograd.Function):
    """Begin a sample's autograd graph at a node that, unlike a leaf, does not hold the sample."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, sample: Tensor, prepare: Callable[[Tensor], Tensor]) -> Tensor:
        return prepare(sample)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        return None, None, None


def _collected(inputs: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """The outputs (B, ...) of ``run`` on samples (1, ...)."""
    first = run(inputs[:1])
    outputs = _layout(first, like=inputs)(len(inputs))
    outputs[0] = first[0]
    del first
    for index in range(1, len(inputs)):
        outputs[index] = run(inputs[index : index + 1])[0]
    return outputs


def _layout(tensor: Tensor, like: Tensor | None = None) -> Callable[[int], Tensor]:
    """A function that allocates a batch (B, ...) in the layout of ``tensor`` (1, ...).

    ``like`` decides the memory format if ``tensor`` has more than one.
    """
    size, dtype, device = tensor.shape[1:], tensor.dtype, tensor.device
    memory_format = torch.contiguous_format
    if _is_channels_last(tensor) and (not tensor.is_contiguous() or _is_channels_last(like)):
        memory_format = torch.channels_last

    def make(batch: int) -> Tensor:
        return torch.empty((batch, *size), dtype=dtype, device=device, memory_format=memory_format)

    return make


def _is_channels_last(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _checked(
    module: fx.GraphModule, name: str, block: Sequence[fx.Node], own: dict[str, fx.Node]
) -> tuple[list[fx.Node], fx.Node]:
    """The nodes of a block in a network's graph, and the node whose value enters."""
    if any(node.name not in own for node in block):
        raise ModelError(f"block {name} is not part of the network; take blocks from its backbone's find_blocks.")
    nodes = [own[node.name] for node in block]
    inside = set(nodes)
    entries = {source for node in nodes for source in node.all_input_nodes} - inside
    if any(source.op == "get_attr" for source in entries):
        raise ModelError(f"block {name} reads tensors of no layer and cannot run sample by sample; leave it out.")
    if len(entries) != 1 or any(user not in inside for node in nodes[:-1] for user in node.users):
        raise ModelError(
            f"block {name} is entered or left by more than one tensor and cannot run sample by sample; "
            "take blocks from the backbone, as it was before side modules were attached."
        )
    layers = [module.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"]
    if any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        raise ModelError(_trains(name))
    if any(isinstance(part, _NormBase) and part.running_mean is None for layer in layers for part in layer.modules()):
        raise ModelError(f"block {name} has a norm without running statistics, which mixes samples; leave it out.")
    return nodes, entries.pop()


def _joined(
    blocks: list[tuple[str, list[fx.Node], fx.Node]], graph: fx.Graph
) -> list[tuple[str, list[fx.Node], fx.Node]]:
    """Name, nodes and entry of blocks in order; two are merged if nothing else reads the feature map between them."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    joined: list[tuple[str, list[fx.Node], fx.Node]] = []
    for name, nodes, entry in sorted(blocks, key=lambda block: place[block[1][0]]):
        if joined and joined[-1][1][-1] is entry and set(entry.users) <= set(nodes):
            before, earlier, first = joined.pop()
            joined.append((f"{before.partition(' to ')[0]} to {name}", [*earlier, *nodes], first))
        else:
            joined.append((name, nodes, entry))
    return joined


def _trains(name: str) -> str:
    return (
        f"block {name} has trained parameters, whose gradients need whole feature maps: freeze them "
        "(requires_grad_(False)), or leave the block out of run_per_sample."
    )


def _body(module: fx.GraphModule, nodes: list[fx.Node], entry: fx.Node) -> fx.GraphModule:
    """A block as a separate module that shares the layers."""
    graph = fx.Graph()
    copies = {entry: graph.placeholder("x")}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[nodes[-1]])
    return fx.GraphModule(module, graph)


def _reads_only(module: fx.GraphModule, nodes: list[fx.Node], entry: fx.Node) -> bool:
    """Whether every reader of a block's input leaves it unchanged."""
    return all(
        isinstance(module.get_submodule(str(user.target)), _READ_ONLY)
        if user.op == "call_module"
        else user.target in (add, torch.add)
        for user in entry.users
        if user in nodes
    )


def _replace(graph: fx.Graph, nodes: list[fx.Node], entry: fx.Node, name: str) -> fx.Node:
    """Replace a block's nodes by a runner, and return its node.

    The graph still names the layers, because a copy of a module loses what its graph does not name.
    """
    with graph.inserting_after(nodes[-1]):
        runner = graph.call_module(name, (entry,))
    nodes[-1].replace_all_uses_with(runner)
    for target in sorted({str(node.target) for node in nodes if node.op == "call_module"}):
        with graph.inserting_before(runner):
            graph.get_attr(target)
    for node in reversed(nodes):
        graph.erase_node(node)
    return runner
