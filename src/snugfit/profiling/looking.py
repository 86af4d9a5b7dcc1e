"""Look at every operator of a network on the meta device: what it takes, keeps and passes back, in bytes of tensors.

Each is run alone, forward and backward, as the layer is that the module holds: lean layers keep what lean layers keep.
Nothing is allocated or computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from snugfit.memory.tensors import LiveBytes

IMAGE = 0
"""Number of the map that is the batch of images."""


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


def look_at(module: fx.GraphModule, input_shape: tuple[int, ...], trains: Set[str], batch: int) -> tuple[Look, ...]:
    """Look at all operators in order of execution, every layer in the mode that it is in.

    Args:
        module: a traced network on any device; it is not changed.
        input_shape: shape of one image; the batch is in channels_last, as are weights of four axes.
        trains: names of the parameters that train.
        batch: images.
    """
    interpreter = _Looking(module)
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
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.looks: list[Look] = []
        self._number: dict[int, int] = {}  # of the map, by identity of a value
        self._giver: dict[int, fx.Node] = {}
        self._maps = IMAGE

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            value = super().run_node(n)
            if n.op == "placeholder":
                self._number[id(value)] = IMAGE
            return value
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        leaves, structure = tree_flatten((args, kwargs))
        return self._look(n, leaves, structure)

    def _look(self, node: fx.Node, leaves: list[Any], structure: Any) -> Any:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        handed = {id(tensor): tensor.clone() for tensor in tensors}
        held = self._held(node)
        meter = LiveBytes()
        for tensor in (*handed.values(), *held):
            meter.add(tensor)
        meter.peak = before = meter.live
        stored: set[int] = set()
        with meter, _noted(stored):
            inputs = [handed[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(inputs, structure)
            output = getattr(self, node.op)(node.target, args, kwargs)
        taken = meter.peak - before
        numbers = {_storage(handed[id(tensor)]): self._number.get(id(tensor), -1) for tensor in tensors}
        made = self._new_maps(output, numbers)
        rest = meter.live - before - sum(made.values())
        flowing = [value for value in tree_iter(output) if isinstance(value, Tensor) and value.requires_grad]
        backward, passed = self._backward(flowing, tensors, held, meter) if flowing else (0, ())
        outputs = [value for value in tree_iter(output) if isinstance(value, Tensor)]
        self.looks.append(
            Look(
                node=node,
                reads=tuple(dict.fromkeys(n for t in tensors if (n := self._number.get(id(t), -1)) >= 0)),
                gives=tuple(dict.fromkeys(n for value in outputs if (n := numbers[_storage(value)]) >= 0)),
                made=made,
                kept=frozenset(numbers[each] for each in stored if numbers.get(each, -1) >= 0),
                kept_inside=max(rest, 0),
                forward_bytes=taken,
                backward_bytes=backward,
                output_bytes=sum(value.nbytes for value in flowing or outputs),
                flows=bool(flowing),
                passed=passed,
                frozen_bytes=sum(p.nbytes for p in held if p.dim() > 1 and not p.requires_grad),
            )
        )
        return self._taken_over(node, output, numbers)

    def _held(self, node: fx.Node) -> list[Tensor]:
        """Weights and buffers of the layer, which are in memory anyway."""
        if node.op != "call_module":
            return []
        layer = self.module.get_submodule(str(node.target))
        return [*layer.parameters(), *layer.buffers()]

    def _new_maps(self, output: Any, numbers: dict[int, int]) -> dict[int, int]:
        """Number the storages that an operator made for its output; their bytes."""
        made = {}
        for value in tree_iter(output):
            if isinstance(value, Tensor) and _storage(value) not in numbers:
                self._maps += 1
                numbers[_storage(value)] = self._maps
                made[self._maps] = value.untyped_storage().nbytes()
        return made

    def _backward(
        self, outputs: list[Tensor], inputs: list[Tensor], held: list[Tensor], meter: LiveBytes
    ) -> tuple[int, tuple[Passed, ...]]:
        wanted = list({id(t): t for t in (*inputs, *held) if t.requires_grad}.values())
        upper = [torch.empty_like(value) for value in outputs]
        for tensor in upper:
            meter.add(tensor)
        meter.peak = before = meter.live
        with meter:
            found = torch.autograd.grad(outputs, wanted, upper, allow_unused=True)
        given = {_storage(tensor) for tensor in upper}
        passed = tuple(
            Passed(self._giver[id(leaf)], gradient.untyped_storage().nbytes(), _storage(gradient) in given)
            for leaf, gradient in zip(wanted, found, strict=True)
            if gradient is not None and id(leaf) in self._giver
        )
        return meter.peak - before, passed

    def _taken_over(self, node: fx.Node, output: Any, numbers: Mapping[int, int]) -> Any:
        """The output as what later operators read: values of their own, without a graph behind them."""

        def leaf(value: Tensor) -> Tensor:
            found = value.detach().requires_grad_(value.requires_grad)
            if numbers[_storage(value)] >= 0:
                self._number[id(found)] = numbers[_storage(value)]
            self._giver[id(found)] = node
            self._alive.append(found)
            return found

        return tree_map_only(Tensor, leaf, output)

    @property
    def _alive(self) -> list[Tensor]:
        """Values are told by their identity, so all are kept; they have no memory."""
        return self.__dict__.setdefault("_values", [])  # type: ignore[no-any-return]


@contextmanager
def _noted(stored: set[int]) -> Iterator[None]:
    """Note the storages that autograd keeps."""

    def keep(tensor: Tensor) -> Tensor:
        stored.add(_storage(tensor))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
