"""A unit's training pass: the features for its local loss and the next unit's input, with few feature maps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from snugfit._chain.tracing import attributes_of
from snugfit.lean import FusedNormAct, FusedPoolNormAct, LeanConv2d
from snugfit.local.base import LocalLoss

_ENDING = "lean_ending"
_ACTIVATIONS: set[type[nn.Module]] = {nn.ReLU, nn.LeakyReLU}
_CONVOLUTIONS: set[type[nn.Module]] = {nn.Conv2d, LeanConv2d}


class _BodyAndTail(nn.Module):
    """A body, and a tail that has no gradient."""

    def __init__(self, body: nn.Module, tail: nn.Module) -> None:
        super().__init__()
        self.body, self.tail = body, tail

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features: Tensor = self.body(inputs)
        with torch.no_grad():
            return features, self.tail(features.detach())


def training_pass(body: nn.Module, tail: nn.Module, loss: LocalLoss) -> nn.Module:
    """Build a module that maps a unit's inputs (B, ...) to its loss's features and to its output, which is detached.

    Layers and weights are those of body and tail. If the loss allows it and the body ends in a BatchNorm and a ReLU or
    LeakyReLU, these use fewer feature maps (:mod:`snugfit.lean`). If the loss reads only a pooled feature map behind a
    convolution, it gets that instead of the whole one. The unit is ``tail(body(x))``.
    """
    side = loss.pooled_side
    if side:
        whole = _with_ending(body, lambda layers: FusedPoolNormAct(layers, side, tail), after_convolution=True)
        if whole is not None:
            return whole
    if loss.gives_up_gradient:
        body = _with_ending(body, lambda layers: layers) or body
    return _BodyAndTail(body, tail)


def _with_ending(
    body: nn.Module, make: Callable[[FusedNormAct], nn.Module], *, after_convolution: bool = False
) -> nn.Module | None:
    """The body with its final BatchNorm and activation replaced; None if it ends otherwise."""
    nodes = _ending_nodes(body, after_convolution=after_convolution) if isinstance(body, fx.GraphModule) else None
    if nodes is None or not isinstance(body, fx.GraphModule):
        return None
    found, (norm, activation) = attributes_of(body), nodes
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(body.graph, copies)
    graph.output(graph.call_module(_ENDING, (copies[norm.all_input_nodes[0]],)))
    for node in (activation, norm):
        graph.erase_node(copies[node])
    ending = make(FusedNormAct(found[str(norm.target)], found[str(activation.target)]))
    return fx.GraphModule({**found, _ENDING: ending}, graph, class_name="Unit")


def _ending_nodes(body: fx.GraphModule, *, after_convolution: bool) -> tuple[fx.Node, fx.Node] | None:
    """The nodes of the final norm and activation of a body, each read only by the next."""
    found = attributes_of(body)
    activation = next(node for node in body.graph.nodes if node.op == "output").args[0]
    if not _is(activation, _ACTIVATIONS, found) or len(activation.all_input_nodes) != 1:
        return None
    norm = activation.all_input_nodes[0]
    if not _is(norm, {nn.BatchNorm2d}, found) or len(norm.users) != 1:
        return None
    before = norm.all_input_nodes[0]
    if after_convolution and not (_is(before, _CONVOLUTIONS, found) and len(before.users) == 1):
        return None
    return norm, activation


def _is(node: fx.Node, kinds: set[type[nn.Module]], found: dict[str, nn.Module]) -> bool:
    """Whether a node calls one of torch's own layers without hooks; other classes may compute something else."""
    if node.op != "call_module":
        return False
    layer = found[str(node.target)]
    return type(layer) in kinds and not layer._forward_hooks and not layer._forward_pre_hooks
