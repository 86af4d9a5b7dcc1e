"""Split a unit around its single layer of weights, for rules that compare neurons' responses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx, nn

from snugfit._chain import Unit
from snugfit._chain.tracing import is_torch_class
from snugfit.errors import ModelError

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_SIZES = ("1d", "2d", "3d")
_NORMS = {"groupnorm", "layernorm", *(f"{kind}norm{size}" for kind in ("batch", "instance") for size in _SIZES)}
_ACTIVATIONS = {
    *("celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leakyrelu", "mish", "relu", "relu6", "selu"),
    *("sigmoid", "silu", "softplus", "softsign", "tanh"),
}
_POOLS = {f"{kind}pool{size}" for kind in ("max", "avg", "adaptiveavg", "adaptivemax") for size in _SIZES}
_RESHAPES = {"clone", "contiguous", "flatten", "getattr", "getitem", "reshape", "size", "squeeze", "view"}
_DROPOUTS = {"alphadropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "featurealphadropout"}
_PASSIVE = {"identity", "mean", "zeropad2d"} | _POOLS | _RESHAPES | _DROPOUTS
_KINDS = {"n": _NORMS, "a": _ACTIVATIONS, "p": _PASSIVE}
_FORM = re.compile("(p*)l(n?a?)(p*)")


@dataclass(frozen=True)
class SingleLayer:
    """A unit as a layer of weights and the operations before and after it; modules are shared with the unit.

    Attributes:
        before, after: pools, dropout and reshaping, of the unit's input and of the responses.
        layer: the convolution or linear layer, whose neurons' weighted sums it returns.
        response: weighted sums to the neurons' responses: normalisation and activation, either or none.
        ends: whether the unit's output is the weighted sums themselves.
    """

    before: nn.Module
    layer: nn.Module
    response: nn.Module
    after: nn.Module
    ends: bool

    @classmethod
    def of(cls, unit: Unit) -> SingleLayer:
        """Split a unit.

        In-place dropout after the activation is set to allocate its output, because the responses are still needed.

        Raises:
            ModelError: the unit has another form.
        """
        nodes = [node for node in unit.module.graph.nodes if node.op not in ("placeholder", "output")]
        form = _FORM.fullmatch("".join(_kind(node, unit.module) for node in nodes))
        if form is None:
            operations = ", ".join(_name(node, unit.module) for node in nodes)
            raise ModelError(f"unit {unit.name} ({operations}) is not one layer {_REST}")
        at, until = len(form[1]), len(form[1]) + 1 + len(form[2])
        if _name(nodes[at], unit.module) == "Linear" and len(unit.output_shape) != 1:
            raise ModelError(f"unit {unit.name} has a linear layer that works on more than one vector of an image")
        stretches = (nodes[:at], nodes[at : at + 1], nodes[at + 1 : until], nodes[until:])
        before, layer, response, after = (_stretch(unit, part) for part in stretches)
        for part in after.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.inplace = False
        return cls(before, layer, response, after, at == len(nodes) - 1)


_REST = "with at most a norm and an activation behind it, in this order, and pools or dropout around them"


def _kind(node: fx.Node, module: nn.Module) -> str:
    """Letter of the operation: layer, norm, activation or passive; a question mark for any other."""
    if node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), _LAYERS):
        return "l"
    name = _name(node, module).replace("_", "").lower()
    return next((letter for letter, names in _KINDS.items() if name in names), "?")


def _name(node: fx.Node, module: nn.Module) -> str:
    """Name of the operation, like ``MaxPool2d`` or ``relu``; the whole path of a class that is not torch's."""
    if node.op == "call_module":
        kind = type(part := module.get_submodule(str(node.target)))
        known = is_torch_class(part) or isinstance(part, _LAYERS)
        return kind.__name__ if known else f"{kind.__module__}.{kind.__qualname__}"
    return str(getattr(node.target, "__name__", node.target))


def _stretch(unit: Unit, nodes: Sequence[fx.Node]) -> nn.Module:
    """Build a module with one input from consecutive nodes of a unit's graph.

    Raises:
        ModelError: they read more than the value of the node before them.
    """
    if not nodes:
        return nn.Identity()
    graph = fx.Graph()
    copies = {nodes[0].prev: graph.placeholder("x")}
    for node in nodes:
        if not copies.keys() >= set(node.all_input_nodes):
            raise ModelError(f"unit {unit.name} joins paths in {_name(node, unit.module)} and is not one layer {_REST}")
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[nodes[-1]])
    return fx.GraphModule(unit.module, graph)
