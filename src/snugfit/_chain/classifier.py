"""The classifier of a network: the part that is retrained for other classes."""

from __future__ import annotations

from torch import nn

from snugfit._chain.chain import Chain


def classifier_names(chain: Chain) -> tuple[str, ...]:
    """Names of the tensors of the network's last layer with any: the classifier."""
    module = chain.head.module
    for node in reversed(module.graph.nodes):
        if node.op == "call_module":
            owned = module.get_submodule(str(node.target)).named_parameters()
            names = tuple(f"{node.target}.{name}" for name, parameter in owned if parameter.requires_grad)
        else:
            direct = (source for source in node.all_input_nodes if source.op == "get_attr")
            values = {str(source.target): attribute(module, str(source.target)) for source in direct}
            names = tuple(n for n, v in values.items() if isinstance(v, nn.Parameter) and v.requires_grad)
        if names:
            return names
    return ()


def attribute(module: nn.Module, name: str) -> object:
    """The attribute under a dotted name in a module."""
    owner, _, last = name.rpartition(".")
    return getattr(module.get_submodule(owner), last)
