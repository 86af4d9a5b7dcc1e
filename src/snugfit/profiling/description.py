"""Properties of modules that need no data: their computation as text, and statistics of units."""

from __future__ import annotations

import copy
import inspect
import math
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from snugfit._chain import Chain, Unit, on_meta_or, tracking_norms
from snugfit._core.profile import UnitStats
from snugfit._meta_device import flop_counter
from snugfit._upstream import shared_names
from snugfit.memory.tensors import saved_bytes

_LIBRARIES = ("torch", "snugfit")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def describe(module: nn.Module) -> str:
    """Operators, settings, shapes and types of a module's computation, and which of its parameters are trained.

    Modules with equal texts cost the same: names of layers and values of weights are left out. For custom classes and
    hooks a digest of the source file is included, because the user may change it, and of a custom class its settings.
    """
    if isinstance(module, fx.GraphModule):
        return _graph(module)
    shared = len(shared_names(module))
    return f"{_module(module)}{f' shares {shared}' if shared else ''}"


def _graph(module: fx.GraphModule) -> str:
    numbers = {node: index for index, node in enumerate(module.graph.nodes)}

    def said(node: fx.Node) -> str:
        arguments = map_arg((node.args, node.kwargs), lambda other: f"%{numbers[other]}")
        return f"{node.op} {describe_node(module, node)} {arguments}"

    return "\n".join(said(node) for node in numbers if node.op != "placeholder")


def describe_node(module: nn.Module, node: fx.Node) -> str:
    """What a node of a graph computes, without its arguments; see :func:`describe`."""
    if node.op == "call_module":
        return describe(module.get_submodule(str(node.target)))
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return _tensor(getattr(module.get_submodule(owner), name))
    if node.op == "call_function":
        return f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__name__', node.target)}"
    return "" if node.op == "output" else str(node.target)


def _module(module: nn.Module) -> str:
    kind = type(module)
    own = kind.__module__.partition(".")[0] in _LIBRARIES
    settings = "" if own else repr({name: value for name, value in vars(module).items() if _is_setting(name, value)})
    parts = [f"{kind.__module__}.{kind.__qualname__}({module.extra_repr()}) {_source(kind)} {settings}"]
    hooks = (hook for name in _HOOKS for hook in getattr(module, name).values())
    callers = (hook if inspect.isroutine(hook) else type(hook) for hook in hooks)
    parts += [f"hook {caller.__qualname__} {_source(caller)}" for caller in callers]
    parts += map(_tensor, [*module.parameters(recurse=False), *module.buffers(recurse=False)])
    parts += [f"({name}) {describe(child)}" for name, child in module.named_children()]
    return "[" + ", ".join(parts) + "]"


def _tensor(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {value.dtype}{' trains' if value.requires_grad else ''}"


def _is_setting(name: str, value: Any) -> bool:
    """Whether an attribute of a module is a plain value that its forward pass may depend on."""
    plain = value is None or isinstance(value, (bool, int, float, str, tuple, list))
    return plain and name != "training" and not name.startswith("_")


def _source(what: Any) -> str:
    """Digest of the file that defines a class or function outside of the libraries."""
    if str(getattr(what, "__module__", "")).partition(".")[0] in _LIBRARIES:
        return ""
    try:
        return _digest(str(inspect.getsourcefile(what)))
    except (OSError, TypeError):  # typed in by hand
        return ""


@cache
def _digest(path: str) -> str:
    return sha256(Path(path).read_bytes()).hexdigest()


def unit_stats(chain: Chain) -> tuple[UnitStats, ...]:
    """Parameters, multiply-accumulates and bytes of every unit of a chain on the meta device, the head last.

    What only a pass on the meta device would tell is 0 or incomplete for a whole network that cannot run there.
    """
    return tuple(_stats(unit) for unit in chain.all_units)


def _stats(unit: Unit) -> UnitStats:
    inputs = torch.empty((2, *unit.input_shape), device="meta")
    module = copy.deepcopy(unit.module) if unit.whole else unit.module  # a pass may change what is no tensor
    held = [*module.parameters(), *module.buffers()]
    module.train()
    with flop_counter() as counter:
        saved = on_meta_or(lambda: saved_bytes(lambda: module(inputs), held), 0, whole=unit.whole)
    return UnitStats(
        name=unit.name,
        parameters=unit.parameters,
        weight_bytes=unit.weight_bytes,
        macs=counter.get_total_flops() // 4,
        output_shape=tuple(unit.output_shape),
        output_bytes=4 * math.prod(unit.output_shape),
        saved_bytes=saved // 2,
        tracks=bool(tracking_norms(module)),
        trained=sum(parameter.numel() for parameter in unit.module.parameters() if parameter.requires_grad),
        tensors=sum(1 for _ in unit.module.parameters()),
    )
