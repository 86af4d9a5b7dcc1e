"""Properties of modules that need no data: their computation as text, and statistics of units."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from snugfit._chain import Chain, Unit, tracking_norms
from snugfit._core.profile import UnitStats
from snugfit.memory.tensors import saved_bytes


def describe(module: nn.Module) -> str:
    """Operators, settings, shapes and types of a module's computation, and which of its parameters are trained.

    Modules with equal texts cost the same: names of layers and values of weights are left out. For custom classes the
    source is included, because the user may change it.
    """
    return _graph(module) if isinstance(module, fx.GraphModule) else _module(module)


def _graph(module: fx.GraphModule) -> str:
    numbers = {node: index for index, node in enumerate(module.graph.nodes)}

    def said(node: fx.Node) -> str:
        arguments = map_arg((node.args, node.kwargs), lambda other: f"%{numbers[other]}")
        return f"{node.op} {_target(module, node)} {arguments}"

    return "\n".join(said(node) for node in numbers if node.op != "placeholder")


def _target(module: fx.GraphModule, node: fx.Node) -> str:
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
    parts = [f"{kind.__module__}.{kind.__qualname__}({module.extra_repr()}) {_source(kind)}"]
    parts += map(_tensor, [*module.parameters(recurse=False), *module.buffers(recurse=False)])
    parts += [f"({name}) {describe(child)}" for name, child in module.named_children()]
    return "[" + ", ".join(parts) + "]"


def _tensor(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {value.dtype}{' trains' if value.requires_grad else ''}"


def _source(kind: type) -> str:
    if kind.__module__.partition(".")[0] in ("torch", "snugfit"):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # typed in by hand
        return ""


def unit_stats(chain: Chain) -> tuple[UnitStats, ...]:
    """Parameters, multiply-accumulates and bytes of every unit of a chain on the meta device, the head last."""
    return tuple(_stats(unit) for unit in chain.all_units)


def _stats(unit: Unit) -> UnitStats:
    inputs = torch.empty((2, *unit.input_shape), device="meta")
    held = [*unit.module.parameters(), *unit.module.buffers()]
    unit.module.train()
    with FlopCounterMode(display=False) as counter:
        saved = saved_bytes(lambda: unit.module(inputs), held)
    return UnitStats(
        name=unit.name,
        parameters=unit.parameters,
        weight_bytes=unit.weight_bytes,
        macs=counter.get_total_flops() // 4,
        output_shape=tuple(unit.output_shape),
        output_bytes=4 * math.prod(unit.output_shape),
        saved_bytes=saved // 2,
        tracks=bool(tracking_norms(unit.module)),
        trained=sum(parameter.numel() for parameter in unit.module.parameters() if parameter.requires_grad),
    )
