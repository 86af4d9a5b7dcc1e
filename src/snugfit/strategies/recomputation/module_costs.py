"""Which modules of a network that has no units can run again exactly, and what that saves: from one watched pass."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from snugfit._chain import Chain, bypassed_hooks, needs_values, without_onednn
from snugfit._chain.python_state import python_state
from snugfit._chain.random_numbers import random_state
from snugfit._meta_device import flop_counter
from snugfit.errors import first_line, is_out_of_memory
from snugfit.memory.tensors import storage_id
from snugfit.strategies.memory_estimates import place_synthetic_weights
from snugfit.strategies.recomputation.module_forward import calls_through
from snugfit.strategies.recomputation.schedule import NAME, ModuleSchedule
from snugfit.strategies.recomputation.unit_costs import BACKWARD, MACS_PER_BYTE

IMAGES = 2
"""Images of the watched pass: in training mode BatchNorm refuses single values."""
LEAST_SHARE = 0.1
"""A module runs again only if it saves more than this share of its inputs' bytes besides its inputs and outputs."""
SIZES, LENGTHS = 12, 8
"""Most sizes up to which modules run again, and most numbers of those modules, counted from the first one on."""

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass
class Call:
    """A call of a module.

    Attributes:
        name: of the module; empty for the network.
        parent: number of the call that it is part of; None for the network's.
        began: number of operators before it.
        state: what its layers hold besides tensors and layers.
        reads: storages of its inputs, weights and buffers.
        inputs, outputs, saved: storages and their bytes.
        work: estimate of its time, in multiply-accumulates.
        reason: why it may not run again.
    """

    name: str
    parent: int | None
    began: int
    state: object
    reads: set[int]
    inputs: dict[int, int]
    outputs: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    work: float = 0.0
    reason: str = ""

    def saved_besides(self, *others: dict[int, int]) -> int:
        """Bytes that it saves in storages that are none of ``others``."""
        return sum(size for key, size in self.saved.items() if not any(key in other for other in others))

    @property
    def gains(self) -> bool:
        """Whether it saves enough to run again."""
        return self.saved_besides(self.inputs, self.outputs) > LEAST_SHARE * sum(self.inputs.values()) > 0


class _Watch(TorchDispatchMode):
    """Watches a forward pass: the calls of modules, what autograd saves in them, and what operators write.

    Statistics that only a batch norm's operator updates count as not written, since recomputation leaves them, too.
    """

    def __init__(self, network: nn.Module, operations: Callable[[], int]) -> None:
        super().__init__()
        self.modules = {name: each for name, each in network.named_modules() if not _is_script(each)}
        self.calls: list[Call] = []
        self.events: list[tuple[int, int | None]] = []
        self._open: list[int] = []
        self._operations, self._count, self._known = operations, 0, 0
        self._written: dict[int, int] = {}
        self._numbers: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._weights = set(self._sizes([*network.parameters(), *network.buffers()]))
        norms = [layer for layer in network.modules() if isinstance(layer, _NormBase)]
        self._statistics = set(self._sizes([(norm.running_mean, norm.running_var) for norm in norms]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for each in func._schema.arguments:
            found = set(self._sizes(given.get(each.name)))
            if "batch_norm" in func.name():  # whose schema does not say what it updates
                is_updated = each.name.startswith("running_") and given.get("training", True)
                found = found - self._statistics if is_updated else set()
            elif each.alias_info is None or not each.alias_info.is_write:
                found &= self._statistics  # read by something else than a batch norm
            self._written |= dict.fromkeys(found, self._count)
        return func(*args, **(kwargs or {}))

    def _sizes(self, values: Any) -> dict[int, int]:
        """A number and the bytes of the storage of each tensor among values of any structure."""
        tensors = (each for each in tree_iter(values) if isinstance(each, Tensor))
        return {self._number(each): each.untyped_storage().nbytes() for each in tensors}

    def _number(self, tensor: Tensor) -> int:
        """A number of the storage of a tensor of any shape, which no other one gets after it."""
        key = storage_id(tensor)
        if key not in self._numbers:
            self._known += 1
            gone = weakref.ref(tensor.untyped_storage(), lambda _: self._numbers.pop(key, None))
            self._numbers[key] = self._known, gone
        return self._numbers[key][0]

    def call(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a module."""
        module, number, inputs = self.modules[name], len(self.calls), self._sizes((args, kwargs))
        reads = {*inputs, *self._sizes([each for layer in module.modules() for each in _read_tensors(layer)])}
        call = Call(name, self._open[-1] if self._open else None, self._count, python_state(module), reads, inputs)
        self.calls.append(call)
        self.events.append((number, None))
        self._open.append(number)
        before, operations = random_state(), self._operations()
        outputs = forward(*args, **kwargs)
        self._open.pop()
        call.outputs = self._sizes(outputs)
        call.work = (self._operations() - operations) / 2 + MACS_PER_BYTE * sum(call.saved.values())
        if before != random_state():
            call.reason = "draws random numbers of Python or numpy"
        elif not all(map(_is_constant, (*args, *kwargs.values()))):
            call.reason = "takes something else than tensors and numbers, which may change"
        return outputs

    def pack(self, tensor: Tensor) -> None:
        """Note a tensor of any shape that autograd saves."""
        ((number, size),) = self._sizes(tensor).items()
        if number not in self._weights and self._open:
            self.events.append((self._open[-1], number))
            for each in self._open:
                self.calls[each].saved[number] = size

    def finish(self) -> None:
        """Find the other reasons against calls, among them what has changed since they began."""
        for call in self.calls:
            module = self.modules[call.name]
            if any(count > call.began for key, count in self._written.items() if key in call.reads):
                call.reason = call.reason or "reads weights, buffers or inputs that the forward pass overwrites"
            elif call.state != python_state(module):
                call.reason = call.reason or "has attributes that the forward pass changes"
            call.reason = call.reason or _reason_against(call.name, module)


def _reason_against(name: str, module: nn.Module) -> str:
    """Why a module may not run again, whatever it is called with."""
    if not re.fullmatch(NAME, name):
        return "has a name that a plan cannot show"
    if bypassed_hooks([module], recomputed=True):
        return "has a layer with a hook, or with a parametrization that has buffers"
    if any(isinstance(layer, nn.RNNBase) and layer.dropout for layer in module.modules()):
        return "has a recurrent layer with dropout, which may draw other random numbers"
    return ""


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_constant(value: Any) -> bool:
    """Whether an argument is a tensor, or a plain value that nothing can change."""
    return isinstance(value, (Tensor, *_CONSTANTS)) or (isinstance(value, tuple) and all(map(_is_constant, value)))


def _read_tensors(layer: nn.Module) -> Iterator[Tensor]:
    """Weights and buffers of a layer, of any shapes, but no count of batches, which recomputation leaves."""
    yield from layer.parameters(recurse=False)
    for name, buffer in layer.named_buffers(recurse=False):
        if not isinstance(layer, _NormBase) or name != "num_batches_tracked":
            yield buffer


@dataclass(frozen=True)
class NetworkCalls:
    """The calls of a watched pass, and in order when they begin (None) and what is saved in them (a storage).

    ``failure`` says why the pass failed; there are no calls then.
    """

    calls: Sequence[Call] = ()
    events: Sequence[tuple[int, int | None]] = ()
    failure: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """Most bytes that a call saves besides its inputs, by name of each module that can run again."""
        refused = {call.name for call in self.calls if call.reason}
        found: dict[str, int] = {}
        for call in self.calls:
            if call.name not in refused and call.gains:
                found[call.name] = max(found.get(call.name, 0), call.saved_besides(call.inputs))
        return found

    def _outermost(self, names: Sequence[str]) -> dict[int, int]:
        """The call that runs again of which each call is part, by number."""
        found: dict[int, int] = {}
        for number, call in enumerate(self.calls):
            if call.parent in found:
                found[number] = found[call.parent]
            elif call.name in names:
                found[number] = number
        return found

    def sample_bytes(self, names: Sequence[str]) -> float:
        """Bytes of feature maps, per image, where the backward pass begins or one of the named modules runs again.

        What was saved before it in the forward pass is then still in memory, and what was saved after it is not.
        """
        stretches, kept, peak = self._outermost(names), dict[int, int](), 0
        for number, storage in self.events:
            call, stretch = self.calls[number], stretches.get(number)
            if stretch is None and storage is not None:
                kept[storage] = call.saved[storage]
            elif storage is None and stretch == number:
                kept |= call.inputs
                peak = max(peak, sum(kept.values()) + call.saved_besides(kept))
        return max(peak, sum(kept.values())) / IMAGES

    def seconds(self, names: Sequence[str]) -> float:
        """Time of a step, relative to one without recomputation."""
        again = sum(self.calls[number].work for number in set(self._outermost(names).values()))
        return 1 + again / (1 + BACKWARD) / max(self.calls[0].work, 1.0)

    def schedules(self) -> list[tuple[ModuleSchedule, float, float]]:
        """Schedules with relative times and bytes per image, each faster than all with less memory; the last is plain.

        The outermost modules up to some size run again: all of them, or the first ones, since the backward pass reaches
        them last.
        """
        found: dict[tuple[str, ...], tuple[float, float]] = {(): (1.0, self.sample_bytes(()))}
        for limit in _spread(sorted(set(self.sizes.values())), SIZES):
            small = [name for name, size in self.sizes.items() if size <= limit]
            names = list(dict.fromkeys(self.calls[number].name for number in self._outermost(small).values()))
            for length in _spread(range(1, len(names) + 1), LENGTHS):
                first = tuple(names[:length])
                found[first] = self.seconds(first), self.sample_bytes(first)
        best: list[tuple[ModuleSchedule, float, float]] = []
        for first, (seconds, size) in sorted(found.items(), key=lambda each: each[1][::-1]):
            if not best or seconds < best[-1][1]:
                best.append((ModuleSchedule(first), seconds, size))
        return best


def _spread(values: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of the values, evenly spaced, from the last one on."""
    return values[:: -max(ceil(len(values) / most), 1)]


def network_calls(network: Chain) -> NetworkCalls:
    """Watch the forward pass of a network that cannot be divided, on the meta device or on random images."""
    made = NetworkCalls()
    for device in ("meta", "cpu"):
        try:
            return _watched(network, device)
        except Exception as error:
            made = NetworkCalls(failure="memory was refused" if is_out_of_memory(error) else first_line(error))
            if not needs_values(error):
                break
    return made


def _watched(network: Chain, device: str) -> NetworkCalls:
    """Watch a second pass, as attributes may be set in the first one alone; nothing keeps what autograd saves."""
    module = copy.deepcopy(network.head.module).train()
    with torch.random.fork_rng(devices=[]), without_onednn():
        torch.default_generator.manual_seed(0)
        place_synthetic_weights(module, device)
        images = torch.randn((IMAGES, *network.input_shape), device=device)
        with torch.no_grad():
            module(images)
        with flop_counter() as counter:
            watch = _Watch(module, counter.get_total_flops)
            with watch, saved_tensors_hooks(watch.pack, _refuse), calls_through(watch.modules, watch.call):
                module(images)
            watch.finish()
    return NetworkCalls(watch.calls, watch.events)


def _refuse(_: object) -> Tensor:
    raise RuntimeError("its forward pass computes gradients")


def reasons_against_modules(network: Chain) -> list[str]:
    """Why no module of a network that cannot be divided can run again; empty if one can."""
    found = network_calls(network)
    if found.sizes:
        return []
    refused = (f"'{call.name}' {call.reason}" for call in found.calls if call.reason and call.parent is not None)
    why = found.failure or next(refused, "none of them saves much besides its inputs and outputs")
    return [f"{reason}; nor can any of its modules run again: {why}" for reason in network.reasons_against_units()]
