"""One call of an operator on the meta device, forward and backward: what it allocates, keeps and passes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from snugfit.memory.tensors import LiveBytes, storage_id


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
    """Run a call forward and backward on tensors of any shape.

    Args:
        call: takes the arguments, with a tensor of the same shape instead of each.
        arguments: on the meta device; those that require a gradient get one.
        held: weights and buffers that it reads, which are in memory anyway.
    """
    handed = [tensor.clone() for tensor in arguments]
    meter = LiveBytes()
    for tensor in (*handed, *held):
        meter.add(tensor)
    meter.peak = before = meter.live
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
