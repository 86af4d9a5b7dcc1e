"""Peak bytes of a training step with a selection of tensors, followed through the operators of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from snugfit._core.tensors import OperatorFacts, Saved
from snugfit.selection.network import Mask, Network


def step_bytes(network: Network, mask: Mask, *, holds_gradients: bool = False) -> int:
    """Peak bytes of the maps and gradients of one forward and backward pass; weights and optimizer state not counted.

    Args:
        network: the profiled network, at its batch.
        mask: the tensors that train, (N,) bool.
        holds_gradients: whether gradients of weights accumulate over micro-batches, instead of being applied and freed
            one by one.
    """
    trains = np.zeros(len(network.operators), dtype=bool)
    trains[network.place[mask]] = True
    passes, flows = network._passes(trains)
    step = _Step(network, mask, holds_gradients)
    kept = [step.kept(index, bool(passes[index])) for index in range(len(network.operators))]
    step.forward(kept, passes)
    step.backward(kept, passes, flows)
    return step.peak


class _Step:
    """Which bytes are alive while a step goes through its operators."""

    def __init__(self, network: Network, mask: Mask, holds_gradients: bool) -> None:
        self.network, self.mask = network, mask
        # gradients of weights that accumulate are there from the second micro-batch on
        held = sum(tensor.bytes for tensor, on in zip(network.tensors, mask, strict=True) if on)
        self.live = self.peak = held if holds_gradients else 0
        self.sizes = {0: network.profile.input_bytes * network.batch}
        self.users: Counter[int] = Counter()
        self.of: list[list[int]] = [[] for _ in network.operators]
        for tensor, operator in enumerate(network.place):
            self.of[operator].append(tensor)

    def kept(self, index: int, passed: bool) -> dict[int, int]:
        """Maps that an operator keeps for its backward pass, with their bytes."""
        operator = self.network.operators[index]
        found: dict[int, int] = {}
        wanted: list[Saved] = list(operator.saved) if passed else []
        for tensor in self.of[index]:
            if self.mask[tensor]:
                wanted += self.network.tensors[tensor].saved
        for saved in wanted:
            found[saved.map] = saved.bytes * self.network.batch
        return found

    def forward(self, kept: list[dict[int, int]], passes: np.ndarray) -> None:
        """Maps come alive where they are given, and die after their last reader unless they are kept."""
        operators = self.network.operators
        dying: dict[int, list[int]] = {}
        for number, reader in _last_readers(operators).items():
            dying.setdefault(reader, []).append(number)
        self._hold(0, self.sizes[0])
        self.users[0] += 1  # the batch stays in the caller's hands
        given = {0}
        for index, operator in enumerate(operators):
            if operator.map not in given:  # in place, or a view, it gives a map that is there
                self._hold(operator.map, operator.output_bytes * self.network.batch)
                given.add(operator.map)
            for number, size in kept[index].items():
                self._hold(number, size)
            scratch = operator.scratch.forward if passes[index] else operator.scratch.alone
            self._touch(scratch * self.network.batch)
            for number in dying.get(index, ()):
                self._let_go(number)

    def backward(self, kept: list[dict[int, int]], passes: np.ndarray, flows: np.ndarray) -> None:
        """Gradients of maps come alive at their readers and die at their givers; those of weights are applied."""
        gradients = _Gradients(self)
        gradients.begin(flows)
        for index in range(len(self.network.operators) - 1, -1, -1):
            if not flows[index]:
                continue
            passed = gradients.passed(index, flows) if passes[index] else []
            self._compute(index, bool(passes[index]))
            for number in kept[index]:
                self._let_go(number)
            gradients.arrive(index, passed)

    def _compute(self, index: int, passed: bool) -> None:
        """Gradients of an operator's weights, which are applied at once, or added to those that are held."""
        tensors = [self.network.tensors[tensor] for tensor in self.of[index] if self.mask[tensor]]
        size = sum(tensor.bytes for tensor in tensors)
        scratch = [tensor.scratch_bytes for tensor in tensors]
        scratch += [self.network.operators[index].scratch.backward] if passed else []
        self._touch(size + max(scratch, default=0) * self.network.batch)

    def _hold(self, number: int, size: int) -> None:
        self.users[number] += 1
        if self.users[number] == 1:
            self.sizes[number] = size
            self._add(size)

    def _let_go(self, number: int) -> None:
        self.users[number] -= 1
        if self.users[number] == 0:
            self.live -= self.sizes[number]

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _touch(self, size: int) -> None:
        """Take bytes and give them back at once."""
        self.peak = max(self.peak, self.live + size)


class _Gradients:
    """Gradients of maps on their way, as autograd hands them on and sums them up.

    Attributes:
        of: per operator, the memory in which the gradient of its output lies; those of several outputs apart.
    """

    def __init__(self, step: _Step) -> None:
        self.step, self.operators, self.batch = step, step.network.operators, step.network.batch
        self.of: dict[int, dict[int, int]] = {}
        self.users: Counter[int] = Counter()
        self.sizes: list[int] = []

    def begin(self, flows: np.ndarray) -> None:
        """The gradient of the network's output comes from the loss."""
        if len(flows) and flows[-1]:
            self.of[len(self.operators) - 1] = {-1: self._new(len(self.operators) - 1)}

    def passed(self, index: int, flows: np.ndarray) -> list[tuple[int, int, int]]:
        """What an operator passes back: for each source the part of its output, and the memory of that gradient."""
        operator, found = self.operators[index], []
        for source in operator.inputs:
            if source < 0 or not flows[source]:
                continue
            if source in operator.handed:
                memory = next(iter(self.of[index].values()))
                self.users[memory] += 1
                found.append((source, index if operator.kind == "getitem" else -1, memory))
            else:
                found.append((source, -1, self._new(source)))
        return found

    def arrive(self, index: int, passed: list[tuple[int, int, int]]) -> None:
        """The gradient of an operator's output is freed, and what it passed is added to what others did."""
        for memory in self.of.pop(index, {}).values():
            self._drop(memory)
        for source, part, memory in passed:
            there = self.of.setdefault(source, {})
            if part not in there:
                there[part] = memory
                continue
            if self.users[there[part]] > 1:  # somebody else reads it: the sum needs memory of its own
                other, there[part] = there[part], self._new(source)
                self._drop(other)
            self._drop(memory)

    def _new(self, operator: int) -> int:
        self.sizes.append(self.operators[operator].output_bytes * self.batch)
        self.users[len(self.sizes) - 1] = 1
        self.step._add(self.sizes[-1])
        return len(self.sizes) - 1

    def _drop(self, memory: int) -> None:
        self.users[memory] -= 1
        if self.users[memory] == 0:
            self.step.live -= self.sizes[memory]


def _last_readers(operators: Sequence[OperatorFacts]) -> dict[int, int]:
    """Per map, the number of the last operator that reads or gives it, or belongs to the unit that it enters."""
    last: dict[int, int] = {}
    for index, operator in enumerate(operators):
        for source in (*operator.inputs, operator.entry):
            last[operators[source].map if source >= 0 else 0] = index
        last.setdefault(operator.map, index)
    if operators:
        last.pop(operators[-1].map, None)
    return last
