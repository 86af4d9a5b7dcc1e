"""The end of a unit's body, with BatchNorm and activation as one lean operator."""

from __future__ import annotations

from torch import fx, nn

from snugfit.chain.tracing import attributes_of
from snugfit.lean import NormActivation

_ENDING = "lean_ending"


def with_lean_ending(body: nn.Module) -> nn.Module:
    """The body with the BatchNorm and the ReLU or LeakyReLU that end it as one :class:`NormActivation`.

    Layers and weights are shared with the body, which stays as it is; it is returned itself where it ends otherwise.
    The gradient of the output must then be of use to nobody else.
    """
    if not isinstance(body, fx.GraphModule):
        return body
    output = next(node for node in body.graph.nodes if node.op == "output").args[0]
    found = attributes_of(body)
    activation = found.get(str(output.target)) if output.op == "call_module" else None
    before = output.all_input_nodes
    norm = found.get(str(before[0].target)) if len(before) == 1 and before[0].op == "call_module" else None
    if not isinstance(activation, (nn.ReLU, nn.LeakyReLU)) or not isinstance(norm, nn.BatchNorm2d):
        return body
    if len(before[0].users) != 1 or type(norm) is not nn.BatchNorm2d:
        return body
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(body.graph, copies)
    last = graph.call_module(_ENDING, (copies[before[0].all_input_nodes[0]],))
    graph.output(last)
    for node in (output, before[0]):
        graph.erase_node(copies[node])
    attributes = {**found, _ENDING: NormActivation(norm, activation)}
    return fx.GraphModule(attributes, graph, class_name="Unit")
