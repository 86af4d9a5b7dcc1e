"""Peak bytes of a training step with a selection of tensors, by the liveness of its tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from snugfit._core.profile import OperatorStats, TensorStats
from snugfit.memory.liveness import OperatorTensors, PassedGradient, StepMemory
from snugfit.selection.network import Mask, Network

_INPUT = 0
"""Number of the feature map that is the network's input."""


def step_bytes(network: Network, mask: Mask, *, holds_gradients: bool = False) -> int:
    """Peak bytes of feature maps and gradients in a forward and backward pass, without weights and optimizer state.

    Args:
        network: the profiled network, at its batch.
        mask: the tensors that train, (N,) bool.
        holds_gradients: whether gradients of weights accumulate over micro-batches, instead of being applied and freed
            one by one.
    """
    operators = list(step_operators(network, mask))
    step = StepMemory(operators, {_INPUT: network.profile.input_bytes * network.batch})
    step.forward()
    step.backward(network.operators[-1].output_bytes * network.batch if operators else 0)
    # accumulated gradients of weights are there from the second micro-batch on
    held = sum(tensor.bytes for tensor, on in zip(network.tensors, mask, strict=True) if on)
    return step.peak + (held if holds_gradients else 0)


def step_operators(network: Network, mask: Mask) -> Iterator[OperatorTensors]:
    """The tensors of every operator in a step with a selection.

    Args:
        network: the profiled network, at its batch.
        mask: the tensors that train, (N,) bool.
    """
    trained: list[list[TensorStats]] = [[] for _ in network.operators]
    for tensor in np.flatnonzero(mask):
        trained[network.place[tensor]].append(network.tensors[tensor])
    passes, flows = network.gradients(mask)
    batch, made = network.batch, {_INPUT}
    for index, (operator, own) in enumerate(zip(network.operators, trained, strict=True)):
        saved = [*(operator.saved if passes[index] else ()), *(each for tensor in own for each in tensor.saved)]
        scratch = [tensor.scratch_bytes for tensor in own] + [operator.scratch.backward] * bool(passes[index])
        yield OperatorTensors(
            number=index,
            reads=tuple(_map_of(network, source) for source in (*operator.inputs, operator.entry)),
            gives=(operator.map,),
            made={} if operator.map in made else {operator.map: operator.output_bytes * batch},
            kept={each.map: each.bytes * batch for each in saved},
            forward_scratch=(operator.scratch.forward if passes[index] else operator.scratch.alone) * batch,
            backward_scratch=sum(tensor.bytes for tensor in own) + max(scratch, default=0) * batch,
            flows=bool(flows[index]),
            passed=tuple(_passed(network, index, flows)) if passes[index] else (),
        )
        made.add(operator.map)


def _map_of(network: Network, source: int) -> int:
    return network.operators[source].map if source >= 0 else _INPUT


def _passed(network: Network, index: int, flows: np.ndarray) -> Iterator[PassedGradient]:
    """The gradients that an operator passes to its inputs."""
    operator: OperatorStats = network.operators[index]
    for source in operator.inputs:
        if source >= 0 and flows[source]:
            size, in_place = network.operators[source].output_bytes * network.batch, source in operator.handed
            part = index if in_place and operator.kind == "getitem" else None
            yield PassedGradient(source, size, in_place, part)
