"""Liveness: which tensors are in memory at each operator of a training step, forward and backward.

Plain arithmetic over one record per operator, which ``selection`` makes from a profile and the tensors that train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class PassedGradient:
    """A gradient that an operator passes back.

    Attributes:
        source: number of the operator whose output it is the gradient of.
        in_place: whether it lies in the memory of the gradient that came in, as with views and sums.
        part: the part of the source's output that it belongs to; gradients of one part are summed. None is all of it.
    """

    source: int
    bytes: int
    in_place: bool = False
    part: int | None = None


@dataclass(frozen=True)
class OperatorTensors:
    """The tensors of one operator in a step.

    Attributes:
        reads: numbers of the feature maps that it reads, or that stay in memory while it runs.
        gives: numbers of the feature maps that hold its output; in-place operators and views reuse one that they read.
        made: bytes of each new feature map among them, by number.
        kept: bytes of each tensor saved for its backward pass, by number; a feature map that is in memory adds none.
        forward_scratch: peak bytes of its forward pass beyond what it makes and keeps.
        backward_scratch: peak bytes of its backward pass beyond the gradients that it passes back.
        flows: whether its output has a gradient.
    """

    number: int
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    made: Mapping[int, int]
    kept: Mapping[int, int]
    forward_scratch: int = 0
    backward_scratch: int = 0
    flows: bool = False
    passed: tuple[PassedGradient, ...] = ()


@dataclass
class OperatorBytes:
    """What one operator takes in a step, in bytes.

    Attributes:
        temporary: alive while it runs forward, without what earlier operators keep.
        kept: what it keeps that no earlier operator keeps.
        backward: alive while it runs backward, without what it and earlier operators keep; None if it does not run.
    """

    temporary: int = 0
    kept: int = 0
    backward: int | None = None


class StepMemory:
    """Follows a step through its operators.

    Args:
        operators: in order of execution.
        given: bytes of the feature maps that exist before the step, by number; they stay in memory.

    Attributes:
        live, kept: bytes alive now, and those of them that are kept for the backward pass.
        found: one per operator, filled in by :meth:`forward` and :meth:`backward`.
    """

    def __init__(self, operators: Sequence[OperatorTensors], given: Mapping[int, int]) -> None:
        self.operators = operators
        self.live = self.kept = 0
        self.found = [OperatorBytes() for _ in operators]
        self.gradients = _Gradients(self)
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._keeper: dict[int, int] = {}  # of a tensor: the first operator that keeps it
        self._dying = _dying(operators, given)
        for number, size in given.items():
            self.hold(number, size)

    @property
    def peak(self) -> int:
        """The most that is alive in the passes that have run."""
        before = list(accumulate((each.kept for each in self.found), initial=0))
        peaks = [kept + each.temporary for kept, each in zip(before, self.found, strict=False)]
        peaks += [
            kept + each.backward for kept, each in zip(before[1:], self.found, strict=True) if each.backward is not None
        ]
        return max(peaks, default=self.live)

    def forward(self) -> None:
        """Feature maps come alive where they are made, and die after their last reader unless they are kept."""
        for index in range(len(self.operators)):
            self._forward_through(index)

    def backward(self, output_bytes: int) -> None:
        """Gradients of feature maps come alive at readers and die at makers; the output's has ``output_bytes``."""
        if self.operators and self.operators[-1].flows:
            self.gradients.begin(self.operators[-1].number, output_bytes)
        for index in reversed(range(len(self.operators))):
            self._backward_through(index)

    def _forward_through(self, index: int) -> None:
        """The forward pass of one operator."""
        operator, found, before = self.operators[index], self.found[index], self.kept
        for number, size in operator.made.items():
            self.hold(number, size)
        for number, size in operator.kept.items():
            if number not in self._keeper:
                self._keeper[number] = index
                self.hold(number, size)
                found.kept += self._sizes[number]
        self.kept += found.kept
        found.temporary = self.live + operator.forward_scratch - before
        for number in self._dying.get(index, ()):
            self.release(number)

    def _backward_through(self, index: int) -> None:
        """The backward pass of one operator; nothing runs where no gradient has arrived."""
        operator, found, kept = self.operators[index], self.found[index], self.kept
        arrived = self.gradients.at(operator.number)
        passed: list[tuple[PassedGradient, int]] = []
        if operator.flows and arrived:
            passed = [(each, self.gradients.passed(each, arrived)) for each in operator.passed]
            found.backward = self.live + operator.backward_scratch - kept
        self.kept -= found.kept
        for number in operator.kept:
            if self._keeper[number] == index:
                self.release(number)
        peak = self.gradients.arrive(operator.number, passed)
        if found.backward is not None:
            found.backward = max(found.backward, peak - kept)

    def hold(self, number: int, size: int) -> None:
        """A tensor has one more user; the first one brings it to memory."""
        self._users[number] += 1
        if self._users[number] == 1:
            self._sizes[number] = size
            self.live += size

    def release(self, number: int) -> None:
        """A tensor has one user less; the last one frees it."""
        self._users[number] -= 1
        if self._users[number] == 0:
            self.live -= self._sizes[number]


class _Gradients:
    """Gradients of feature maps, as autograd passes them on and sums them up."""

    def __init__(self, step: StepMemory) -> None:
        self.step = step
        self._of: dict[int, dict[int | None, int]] = {}  # memory per part of an operator's output
        self._users: Counter[int] = Counter()
        self._sizes: list[int] = []

    def begin(self, operator: int, size: int) -> None:
        """The gradient of an operator's output comes from elsewhere."""
        self._of[operator] = {None: self.new(size)}

    def at(self, operator: int) -> list[int]:
        """Memory of the gradients that have arrived at an operator."""
        return list(self._of.get(operator, {}).values())

    def passed(self, each: PassedGradient, arrived: Sequence[int]) -> int:
        """Memory of a gradient that is passed back."""
        if not each.in_place:
            return self.new(each.bytes)
        self._users[arrived[0]] += 1
        return arrived[0]

    def arrive(self, operator: int, passed: Iterable[tuple[PassedGradient, int]]) -> int:
        """Free the gradient of an operator's output and sum what it passed; returns the most alive meanwhile."""
        peak = self.step.live
        for memory in self._of.pop(operator, {}).values():
            self._drop(memory)
        for each, memory in passed:
            there = self._of.setdefault(each.source, {})
            if each.part not in there:
                there[each.part] = memory
                continue
            if self._users[there[each.part]] > 1:  # something else reads it: the sum needs memory of its own
                other, there[each.part] = there[each.part], self.new(each.bytes)
                peak = max(peak, self.step.live)
                self._drop(other)
            self._drop(memory)
        return peak

    def new(self, size: int) -> int:
        """Memory for a gradient."""
        self._sizes.append(size)
        self._users[len(self._sizes) - 1] = 1
        self.step.live += size
        return len(self._sizes) - 1

    def _drop(self, memory: int) -> None:
        self._users[memory] -= 1
        if self._users[memory] == 0:
            self.step.live -= self._sizes[memory]


def _dying(operators: Sequence[OperatorTensors], held: Iterable[int]) -> dict[int, list[int]]:
    """Per operator, the feature maps of which it is the last reader; held ones and the last output never die."""
    last: dict[int, int] = {}
    for index, operator in enumerate(operators):
        for number in (*operator.reads, *operator.gives):
            last[number] = index
    for number in (*held, *(operators[-1].gives if operators else ())):
        last.pop(number, None)
    dying: dict[int, list[int]] = {}
    for number, index in last.items():
        dying.setdefault(index, []).append(number)
    return dying
