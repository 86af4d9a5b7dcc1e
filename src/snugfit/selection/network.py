"""What a selection of tensors costs, from the profile of every operator: seconds, bytes and multiply-accumulates.

Two views of one network. The *chain* of section 2.2 and 5 in ElasticTrainer, tensors in order of execution with one
``t_dw`` and one ``t_dy`` each, is the input of the dynamic program. The *graph* of operators gives the cost of a given
selection more exactly: where branches meet, the chain charges for a branch that no gradient enters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from snugfit._core.profile import OperatorStats, TensorProfile, TensorStats
from snugfit.memory.liveness import OperatorTensors, PassedGradient, StepMemory

Mask = np.ndarray
"""Which tensors train: (N,) bool, in order of execution."""
_INPUT = 0
"""Number of the feature map that is the network's input."""


@dataclass(frozen=True)
class Network:
    """A profiled network at one batch size.

    Times and feature maps grow with the (micro-)batch, updates do not. ``state_copies`` are
    the bytes of optimizer state per byte of trained tensors.
    """

    profile: TensorProfile
    batch: int
    state_copies: float = 1

    @property
    def operators(self) -> Sequence[OperatorStats]:
        """The operators in order of execution."""
        return self.profile.operators

    @cached_property
    def tensors(self) -> tuple[TensorStats, ...]:
        """The tensors in order of execution, of any shape."""
        return self.profile.tensors

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Parameter names in order of execution."""
        return tuple(tensor.name for tensor in self.tensors)

    @cached_property
    def place(self) -> np.ndarray:
        """Number of the operator of each tensor, (N,)."""
        return np.array([i for i, operator in enumerate(self.operators) for _ in operator.tensors], dtype=np.int64)

    @property
    def scale(self) -> float:
        """Ratio of times at this batch to those of the profile's."""
        return self.batch / self.profile.batch

    @cached_property
    def head(self) -> Mask:
        """Tensors of the last layer that has any: the classifier."""
        return np.asarray(self.place == self.place[-1]) if len(self.place) else np.zeros(0, dtype=bool)

    def mask(self, names: Iterable[str]) -> Mask:
        """The selection of these tensors."""
        wanted = set(names)
        return np.array([name in wanted for name in self.names], dtype=bool)

    def selected(self, mask: Mask) -> tuple[str, ...]:
        """Names of a selection's tensors, in order of execution."""
        return tuple(name for name, on in zip(self.names, mask, strict=True) if on)

    @cached_property
    def t_dw(self) -> np.ndarray:
        """Seconds to compute and apply each tensor's update, (N,)."""
        return np.array([tensor.seconds * self.scale + tensor.update_seconds for tensor in self.tensors])

    @cached_property
    def t_dy(self) -> np.ndarray:
        """Seconds to carry the gradient from each tensor to the one before it, (N,).

        The time to pass a gradient is counted to the tensor at whose input it ends. A bias therefore has none (section
        5.1, footnote 8), the tensors of a norm have that of the whole norm together (section 5.2), and a layer without
        tensors (section 5.3) counts to the tensor after it. Counted to the layer before, the time would be lost if that
        tensor is the earliest one selected, whose own ``t_dy`` is not charged.
        """
        return self._differences([operator.pass_seconds * self.scale for operator in self.operators])

    @cached_property
    def pass_bytes(self) -> np.ndarray:
        """Bytes kept when the gradient passes from each tensor to the one before it, (N,).

        A feature map that several operators keep counts where the gradient, on its way from the output, first needs it.
        """
        seen: set[int] = set()
        kept = []
        for operator in reversed(self.operators):
            new = {saved.map: saved.bytes for saved in operator.saved if saved.map not in seen}
            seen |= new.keys()
            kept.append(sum(new.values()) * self.batch)
        return self._differences(kept[::-1]).astype(np.int64)

    def _differences(self, values: Sequence[float]) -> np.ndarray:
        """For each tensor, the sum over the operators after the previous tensor's, including its own."""
        passed = np.concatenate([np.cumsum(np.asarray(values, dtype=np.float64)[::-1])[::-1], [0.0]])
        reach = passed[self.place + 1]
        before = np.concatenate([[passed[0]], reach[:-1]])
        return np.asarray(np.maximum(before - reach, 0.0))

    @cached_property
    def own_bytes(self) -> np.ndarray:
        """Bytes of optimizer state of each tensor, and of what is kept for it alone, (N,)."""
        alone = [sum(s.bytes for s in t.saved[1:]) * self.batch for t in self.tensors]
        state = np.ceil(np.array([t.bytes for t in self.tensors]) * self.state_copies)
        return state.astype(np.int64) + np.array(alone, dtype=np.int64)

    @cached_property
    def gradient_bytes(self) -> np.ndarray:
        """Bytes of each tensor's gradient, (N,)."""
        return np.array([t.bytes for t in self.tensors], dtype=np.int64)

    @cached_property
    def input_bytes(self) -> np.ndarray:
        """Bytes of the feature map that is kept for each tensor, (N,); tensors that read the same one share it."""
        return np.array([t.saved[0].bytes * self.batch if t.saved else 0 for t in self.tensors], dtype=np.int64)

    def shared_inputs(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The feature maps kept for some tensors, (M,) indices.

        Returns each tensor's number among them, (M,), -1 for none; and their bytes.
        """
        maps = [self.tensors[i].saved[0].map if self.tensors[i].saved else -1 for i in chosen]
        numbers = {number: index for index, number in enumerate(dict.fromkeys(m for m in maps if m >= 0))}
        sizes = np.zeros(len(numbers), dtype=np.int64)
        for tensor, number in zip(chosen, maps, strict=True):
            if number >= 0:
                sizes[numbers[number]] = self.input_bytes[tensor]
        return np.array([numbers.get(number, -1) for number in maps], dtype=np.int64), sizes

    def gradients(self, mask: Mask) -> tuple[np.ndarray, np.ndarray]:
        """Whether a gradient passes to the inputs, and arrives at the output, of each operator, (operators,) bool."""
        trains = np.zeros(len(self.operators), dtype=bool)
        trains[self.place[mask]] = True
        inputs, output = np.zeros_like(trains), np.zeros_like(trains)
        for index, operator in enumerate(self.operators):
            inputs[index] = any(output[source] for source in operator.inputs if source >= 0)
            output[index] = inputs[index] or trains[index]
        return inputs, output

    def forward_seconds(self) -> float:
        """Seconds of a forward pass without gradients."""
        return sum(operator.forward_seconds for operator in self.operators) * self.scale

    def backward_seconds(self, mask: Mask) -> float:
        """Seconds that a selection adds to a forward pass, including updates (section 2.2, on the graph)."""
        passed = sum(op.pass_seconds for op, on in zip(self.operators, self.gradients(mask)[0], strict=True) if on)
        return passed * self.scale + float(self.t_dw[mask].sum())

    def macs(self, mask: Mask) -> int:
        """Multiply-accumulates of a training step per sample: forward pass, passing of gradients, weight gradients."""
        forward = sum(operator.macs for operator in self.operators)
        passed = sum(op.macs for op, on in zip(self.operators, self.gradients(mask)[0], strict=True) if on)
        return forward + passed + sum(t.macs for t, on in zip(self.tensors, mask, strict=True) if on)

    def state_bytes(self, mask: Mask) -> int:
        """Bytes of optimizer state of a selection."""
        return math.ceil(self.state_copies * sum(t.bytes for t, on in zip(self.tensors, mask, strict=True) if on))


def step_bytes(network: Network, mask: Mask, *, holds_gradients: bool = False) -> int:
    """Peak bytes of feature maps and gradients in a step that trains ``mask`` (N,); no weights and optimizer state.

    ``holds_gradients``: gradients of weights accumulate over micro-batches, instead of being freed one by one.
    """
    operators = list(step_operators(network, mask))
    step = StepMemory(operators, {_INPUT: network.profile.input_bytes * network.batch})
    step.forward()
    step.backward(network.operators[-1].output_bytes * network.batch if operators else 0)
    # accumulated gradients of weights are there from the second micro-batch on
    held = sum(tensor.bytes for tensor, on in zip(network.tensors, mask, strict=True) if on)
    return step.peak + (held if holds_gradients else 0)


def step_operators(network: Network, mask: Mask) -> Iterator[OperatorTensors]:
    """The tensors of every operator in a step that trains the tensors of ``mask`` (N,)."""
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
