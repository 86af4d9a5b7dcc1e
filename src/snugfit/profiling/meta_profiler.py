"""The tensors of every operator of a network, from runs on the meta device: those it makes, keeps and passes back.

Each operator runs alone, forward and backward, through the layer that the module holds, so that lean layers save what
they save in training. Nothing is allocated or computed. Repeated calls run once, so that tracing candidates is cheap.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from snugfit._chain.propagation import Call
from snugfit.memory.liveness import OperatorTensors, PassedGradient
from snugfit.memory.tensors import LiveBytes, storage_id

IMAGE = 0
"""Number of the feature map that is the batch of images."""
_NO_MAP = -1
_SEEN: dict[Hashable, CallTrace] = {}
"""Cached calls, by everything that they depend on."""


@dataclass(frozen=True)
class MetaOperator:
    """One operator on a batch.

    Attributes:
        output_bytes: bytes of its output, and of that one's gradient.
        frozen_bytes: bytes of its frozen weights with two or more axes, in the precision of the computation.
        alone: its tensors on a single image, if that was requested.
    """

    node: fx.Node
    tensors: OperatorTensors
    output_bytes: int
    frozen_bytes: int
    alone: OperatorTensors | None = None


def profile_on_meta(
    module: fx.GraphModule,
    input_shape: tuple[int, ...],
    trains: Set[str],
    batch: int,
    single: Set[fx.Node] = frozenset(),
) -> tuple[MetaOperator, ...]:
    """Run all operators on the meta device in order of execution, every layer in its current mode.

    The batch is in channels_last, as are weights of four axes. Operators in ``single`` also run on a single image.
    """
    interpreter = _MetaProfiler(module, single)
    stand_ins = {f"module.{name}": tensor for name, tensor in _stand_ins(module, trains).items()}
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    images = _channels_last(torch.empty((batch, *input_shape), dtype=dtype, device="meta"))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        functional_call(Call(module, interpreter.run), stand_ins, (images,))
    return tuple(interpreter.found)


def _stand_ins(module: nn.Module, trains: Set[str]) -> dict[str, Tensor]:
    named = chain(module.named_parameters(), module.named_buffers())
    return {
        name: _channels_last(torch.empty_like(tensor, device="meta")).requires_grad_(name in trains)
        for name, tensor in named
    }


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


class _MetaProfiler(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, single: Set[fx.Node]) -> None:
        super().__init__(module)
        self.found: list[MetaOperator] = []
        self.single = single
        self._number: dict[int, int] = {}  # of the map, by identity of a value
        self._giver: dict[int, int] = {}  # number of the operator that gave a value, by its identity
        self._values: list[Tensor] = []  # identified by ``id``, so all are kept; they have no memory
        self._maps = IMAGE

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            value = super().run_node(n)
            if n.op == "placeholder":
                self._number[id(value)] = IMAGE
            return value
        leaves, structure = tree_flatten(self.fetch_args_kwargs_from_env(n))
        arguments = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        trace = self._trace(n, leaves, structure, arguments)
        first = self._maps
        self._maps += len(trace.made) + 1
        alone = None
        if n in self.single:
            rows = {id(tensor): _first_row(tensor) for tensor in arguments}
            shorter = [rows.get(id(leaf), leaf) for leaf in leaves]
            alone = self._tensors(n, self._trace(n, shorter, structure, list(rows.values())), arguments, first)
        frozen = sum(p.nbytes for p in self._held(n) if p.dim() > 1 and not p.requires_grad)
        tensors = self._tensors(n, trace, arguments, first)
        output = self._taken_over(trace, arguments, first)
        self.found.append(MetaOperator(n, tensors, trace.output_bytes, frozen, alone))
        return output

    def _trace(self, node: fx.Node, leaves: list[Any], structure: Any, arguments: list[Tensor]) -> CallTrace:
        order = {id(tensor): place for place, tensor in enumerate(arguments)}
        held = self._held(node)

        def call(handed: list[Tensor]) -> Any:
            given = [handed[order[id(leaf)]] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(given, structure)
            return getattr(self, node.op)(node.target, args, kwargs)

        key = self._key(node, leaves, structure, order, held)
        if key is None:
            return trace_call(call, arguments, held)
        if key not in _SEEN:
            _SEEN[key] = trace_call(call, arguments, held)
        return _SEEN[key]

    def _key(
        self, node: fx.Node, leaves: list[Any], structure: Any, order: Mapping[int, int], held: list[Tensor]
    ) -> Hashable | None:
        """Everything that a call depends on, shapes included; None if a custom layer may depend on more."""
        what: Hashable = node.target
        if node.op == "call_module":
            layer = self.module.get_submodule(str(node.target))
            if not _is_plain(layer):
                return None
            what = (type(layer), repr(layer), layer.training)
        given = tuple(
            (order[id(leaf)], _description(leaf)) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
        )
        return (node.op, what, str(structure), given, tuple(map(_description, held)))

    def _map(self, place: int, arguments: list[Tensor], first: int) -> int:
        """Number of the feature map, of any shape, at a place: an argument, or below 0 one that the operator makes."""
        return first - place if place < 0 else self._number.get(id(arguments[place]), _NO_MAP)

    def _tensors(self, node: fx.Node, trace: CallTrace, arguments: list[Tensor], first: int) -> OperatorTensors:
        """A trace in the context of the network: feature maps (B, ...) and gradients have numbers.

        The number after those of the feature maps that it makes stands for everything else that it keeps.
        """

        def numbers(places: Iterable[int]) -> list[int]:
            found = (self._map(place, arguments, first) for place in places)
            return [each for each in dict.fromkeys(found) if each != _NO_MAP]

        made = {first + 1 + index: size for index, size in enumerate(trace.made)}
        kept = {**dict.fromkeys(numbers(sorted(trace.kept)), 0), first + 1 + len(made): trace.kept_inside}
        part = len(self.found) if node.target is operator.getitem else None  # one item of several
        passed = tuple(
            PassedGradient(self._giver[id(arguments[place])], size, in_place, part)
            for place, size, in_place in trace.passed
            if id(arguments[place]) in self._giver
        )
        return OperatorTensors(
            number=len(self.found),
            reads=tuple(numbers(range(len(arguments)))),
            gives=tuple(numbers(trace.places)),
            made=made,
            kept=kept,
            forward_scratch=trace.forward_bytes - sum(trace.made) - trace.kept_inside,
            backward_scratch=trace.backward_bytes - sum(each.bytes for each in passed if not each.in_place),
            flows=trace.flows,
            passed=passed,
        )

    def _held(self, node: fx.Node) -> list[Tensor]:
        """Weights and buffers of the layer, in their shapes, which are in memory anyway."""
        if node.op != "call_module":
            return []
        layer = self.module.get_submodule(str(node.target))
        return [*layer.parameters(), *layer.buffers()]

    def _taken_over(self, trace: CallTrace, arguments: list[Tensor], first: int) -> Any:
        """The output (B, ...) as separate values, which later operators read."""
        output = tree_map_only(Tensor, lambda value: value.detach().requires_grad_(value.requires_grad), trace.output)
        values = [value for value in tree_iter(output) if isinstance(value, Tensor)]
        for value, place in zip(values, trace.places, strict=True):
            number = self._map(place, arguments, first)
            if number != _NO_MAP:
                self._number[id(value)] = number
            self._giver[id(value)] = len(self.found)
        self._values += values
        return output


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer's description is complete: torch's own layers, and this project's variants of them."""
    kind = type(layer)
    of_torch = any(base is not nn.Module and base.__module__.startswith("torch.nn.modules.") for base in kind.__mro__)
    return of_torch and kind.__module__.partition(".")[0] in ("torch", "snugfit")


def _description(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _first_row(tensor: Tensor) -> Tensor:
    return tensor[:1].detach().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class CallTrace:
    """One call, in bytes; arguments are identified by their number, and tensors made for the output by -1, -2, ...

    Attributes:
        output: its output, without a graph.
        places: for each tensor of the output, the argument that it lies in, or the tensor made for it.
        made: bytes of what was made for the output.
        kept: bytes of these that are saved for the backward pass.
        kept_inside: other saved bytes.
        forward_bytes, backward_bytes: the most that each pass takes, without what was there before it.
        output_bytes: bytes of the output's gradient, or of the output if it has none.
        flows: whether its output receives a gradient.
        passed: of each gradient passed back: argument, bytes, and whether they are those of the incoming gradient.
    """

    output: Any
    places: tuple[int, ...]
    made: tuple[int, ...]
    kept: frozenset[int]
    kept_inside: int
    forward_bytes: int
    backward_bytes: int
    output_bytes: int
    flows: bool
    passed: tuple[tuple[int, int, bool], ...]


def trace_call(call: Callable[[list[Tensor]], Any], arguments: Sequence[Tensor], held: Sequence[Tensor]) -> CallTrace:
    """Run a call forward and backward on tensors of any shape, on the meta device.

    ``call`` takes tensors of the arguments' shapes; ``held`` are weights and buffers, which are in memory anyway.
    """
    handed = [tensor.clone() for tensor in arguments]
    meter = LiveBytes((*handed, *held))
    before = meter.live
    stored: set[int] = set()
    with meter, _noted(stored):
        output = call(handed)
    outputs = [value for value in tree_iter(output) if isinstance(value, Tensor)]
    known = {storage_id(tensor): place for place, tensor in enumerate(handed)}
    made: list[int] = []
    for value in outputs:
        if storage_id(value) not in known:
            made.append(value.untyped_storage().nbytes())
            known[storage_id(value)] = -len(made)
    taken, inside = meter.peak - before, meter.live - before - sum(made)
    flowing = [value for value in outputs if value.requires_grad]
    backward, passed = _backward(flowing, arguments, held, meter) if flowing else (0, ())
    return CallTrace(
        output=tree_map_only(Tensor, lambda value: value.detach().requires_grad_(value.requires_grad), output),
        places=tuple(known[storage_id(value)] for value in outputs),
        made=tuple(made),
        kept=frozenset(known[each] for each in stored if each in known),
        kept_inside=max(inside, 0),
        forward_bytes=taken,
        backward_bytes=backward,
        output_bytes=sum(value.nbytes for value in flowing or outputs),
        flows=bool(flowing),
        passed=passed,
    )


def _backward(
    outputs: list[Tensor], arguments: Sequence[Tensor], held: Sequence[Tensor], meter: LiveBytes
) -> tuple[int, tuple[tuple[int, int, bool], ...]]:
    wanted = [(place, tensor) for place, tensor in enumerate((*arguments, *held)) if tensor.requires_grad]
    upper = [torch.empty_like(value) for value in outputs]
    for tensor in upper:
        meter.add(tensor)
    meter.peak = before = meter.live
    with meter:
        found = torch.autograd.grad(outputs, [tensor for _, tensor in wanted], upper, allow_unused=True)
    given = {storage_id(tensor) for tensor in upper}
    passed = tuple(
        (place, gradient.untyped_storage().nbytes(), storage_id(gradient) in given)
        for (place, _), gradient in zip(wanted, found, strict=True)
        if gradient is not None and place < len(arguments)
    )
    return meter.peak - before, passed


@contextmanager
def _noted(stored: set[int]) -> Iterator[None]:
    """Record the storages that autograd saves."""

    def keep(tensor: Tensor) -> Tensor:
        stored.add(storage_id(tensor))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
