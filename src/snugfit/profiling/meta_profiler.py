"""Look at every operator of a network on the meta device: what it takes, keeps and passes back, in bytes of tensors.

Each is run alone, forward and backward, as the layer is that the module holds: lean layers keep what lean layers keep.
Nothing is allocated or computed. A call that was seen before is not run again: tracing candidates costs little.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from snugfit.profiling.operator_tracing import CallTrace, trace_call

IMAGE = 0
"""Number of the map that is the batch of images."""
_NO_MAP = -1
_SEEN: dict[Hashable, CallTrace] = {}
"""Calls by all that they depend on."""


@dataclass(frozen=True)
class Passed:
    """A gradient that an operator passes back.

    Attributes:
        source: the operator whose output it is the gradient of.
        bytes: its bytes.
        handed: whether it lies in the memory of the gradient that came in.
    """

    source: fx.Node
    bytes: int
    handed: bool


@dataclass(frozen=True)
class Look:
    """One operator on a batch.

    Attributes:
        node: the operator.
        reads: numbers of the maps that it reads.
        gives: numbers of the maps that its output lies in.
        made: bytes of those that are new, by number.
        kept: numbers of maps that are kept for its backward pass.
        kept_inside: bytes that are kept besides.
        forward_bytes: the most that its forward pass takes beside what was there, its output and what is kept included.
        backward_bytes: the same of its backward pass, the gradients that it makes included.
        output_bytes: bytes of its output, and of that one's gradient.
        flows: whether a gradient comes to it.
        passed: the gradients that it passes back.
        frozen_bytes: bytes of its frozen weights with two and more axes, as they are computed with.
        alone: the same operator on a single image, where that was asked for.
    """

    node: fx.Node
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    made: Mapping[int, int]
    kept: frozenset[int]
    kept_inside: int
    forward_bytes: int
    backward_bytes: int
    output_bytes: int
    flows: bool
    passed: tuple[Passed, ...]
    frozen_bytes: int
    alone: Look | None = None


def look_at(
    module: fx.GraphModule,
    input_shape: tuple[int, ...],
    trains: Set[str],
    batch: int,
    single: Set[fx.Node] = frozenset(),
) -> tuple[Look, ...]:
    """Look at all operators in order of execution, every layer in the mode that it is in.

    Args:
        module: a traced network on any device; it is not changed.
        input_shape: shape of one image; the batch is in channels_last, as are weights of four axes.
        trains: names of the parameters that train.
        batch: images.
        single: operators that are looked at on a single image as well.
    """
    interpreter = _Looking(module, single)
    stand_ins = {f"module.{name}": tensor for name, tensor in _stand_ins(module, trains).items()}
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    images = _channels_last(torch.empty((batch, *input_shape), dtype=dtype, device="meta"))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        functional_call(_Call(module, interpreter), stand_ins, (images,))
    return tuple(interpreter.looks)


class _Call(nn.Module):
    """Lets an interpreter see a module's stand-ins."""

    def __init__(self, module: nn.Module, interpreter: fx.Interpreter) -> None:
        super().__init__()
        self.module = module
        self.__dict__["interpreter"] = interpreter

    def forward(self, images: Tensor) -> Any:
        return self.__dict__["interpreter"].run(images)


def _stand_ins(module: nn.Module, trains: Set[str]) -> dict[str, Tensor]:
    named = chain(module.named_parameters(), module.named_buffers())
    return {
        name: _channels_last(torch.empty_like(tensor, device="meta")).requires_grad_(name in trains)
        for name, tensor in named
    }


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


class _Looking(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, single: Set[fx.Node]) -> None:
        super().__init__(module)
        self.looks: list[Look] = []
        self.single = single
        self._number: dict[int, int] = {}  # of the map, by identity of a value
        self._giver: dict[int, fx.Node] = {}
        self._values: list[Tensor] = []  # told by their identity, so all are kept; they have no memory
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
        self._maps += len(trace.made)
        look = self._placed(n, trace, arguments, first)
        if n in self.single:
            rows = {id(tensor): _first_row(tensor) for tensor in arguments}
            shorter = [rows.get(id(leaf), leaf) for leaf in leaves]
            alone = self._trace(n, shorter, structure, list(rows.values()))
            look = Look(**{**look.__dict__, "alone": self._placed(n, alone, arguments, first)})
        self.looks.append(look)
        return self._taken_over(n, trace, arguments, first)

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
        """All that a call depends on; None where a layer of the user's may depend on more."""
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

    def _placed(self, node: fx.Node, trace: CallTrace, arguments: list[Tensor], first: int) -> Look:
        """A trace at its place in the network: maps have numbers, and gradients operators that they go to."""

        def number(place: int) -> int:
            return first - place if place < 0 else self._number.get(id(arguments[place]), _NO_MAP)

        reads = dict.fromkeys(number(place) for place in range(len(arguments)))
        return Look(
            node=node,
            reads=tuple(each for each in reads if each != _NO_MAP),
            gives=tuple(each for each in dict.fromkeys(map(number, trace.places)) if each != _NO_MAP),
            made={first + 1 + index: size for index, size in enumerate(trace.made)},
            kept=frozenset(map(number, trace.kept)) - {_NO_MAP},
            kept_inside=trace.kept_inside,
            forward_bytes=trace.forward_bytes,
            backward_bytes=trace.backward_bytes,
            output_bytes=trace.output_bytes,
            flows=trace.flows,
            passed=tuple(
                Passed(self._giver[id(arguments[place])], size, handed)
                for place, size, handed in trace.passed
                if id(arguments[place]) in self._giver
            ),
            frozen_bytes=sum(p.nbytes for p in self._held(node) if p.dim() > 1 and not p.requires_grad),
        )

    def _held(self, node: fx.Node) -> list[Tensor]:
        """Weights and buffers of the layer, which are in memory anyway."""
        if node.op != "call_module":
            return []
        layer = self.module.get_submodule(str(node.target))
        return [*layer.parameters(), *layer.buffers()]

    def _taken_over(self, node: fx.Node, trace: CallTrace, arguments: list[Tensor], first: int) -> Any:
        """The output as values of its own, which later operators read."""
        output = tree_map_only(Tensor, lambda value: value.detach().requires_grad_(value.requires_grad), trace.output)
        values = [value for value in tree_iter(output) if isinstance(value, Tensor)]
        for value, place in zip(values, trace.places, strict=True):
            number = first - place if place < 0 else self._number.get(id(arguments[place]), _NO_MAP)
            if number != _NO_MAP:
                self._number[id(value)] = number
            self._giver[id(value)] = node
        self._values += values
        return output


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer's description tells all about it: torch's own, and this project's variants of them."""
    kind = type(layer)
    of_torch = any(base is not nn.Module and base.__module__.startswith("torch.nn.modules.") for base in kind.__mro__)
    return of_torch and kind.__module__.partition(".")[0] in ("torch", "snugfit")


def _description(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _first_row(tensor: Tensor) -> Tensor:
    return tensor[:1].detach().requires_grad_(tensor.requires_grad)
