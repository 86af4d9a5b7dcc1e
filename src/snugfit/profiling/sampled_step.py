"""The liveness of a step in which some frozen blocks run one image at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from snugfit.memory.liveness import OperatorTensors, PassedGradient, StepMemory


@dataclass(frozen=True)
class Stretch:
    """Consecutive operators.

    Attributes:
        start, stop: they begin at ``start`` and end before ``stop``.
        alone: the same operators on a single image, if they run one image at a time; else none.
    """

    start: int
    stop: int
    alone: tuple[OperatorTensors, ...] = ()


class SampledStep(StepMemory):
    """Follows a step through its operators; sampled stretches run one image at a time.

    Args:
        operators: on the batch, in order of execution.
        given: bytes of the feature maps that are there before, by number.
        stretches: all operators in order.
        batch: images.
        spent: whether what is given is freed after its last reader; else it stays.
    """

    def __init__(
        self,
        operators: Sequence[OperatorTensors],
        given: dict[int, int],
        stretches: Sequence[Stretch],
        batch: int,
        *,
        spent: bool = False,
    ) -> None:
        super().__init__(operators, given, spent=spent)
        self.stretches, self.batch = stretches, batch
        self._images: dict[int, _Image] = {}  # by the start of a sampled stretch

    def forward(self) -> None:
        """The forward pass."""
        for stretch in self.stretches:
            if stretch.alone:
                self._forward_by_sample(stretch)
            else:
                for index in range(stretch.start, stretch.stop):
                    self.forward_through(index)

    def backward(self, output_bytes: int) -> None:
        """The backward pass; ``output_bytes`` are those of the output's gradient, where it is new."""
        self.begin_backward(output_bytes)
        for stretch in reversed(self.stretches):
            if stretch.alone:
                self._backward_by_sample(stretch)
            else:
                for index in reversed(range(stretch.start, stretch.stop)):
                    self.backward_through(index)

    def _forward_by_sample(self, stretch: Stretch) -> None:
        """The last image of the batch, with the whole output in memory, and what all images keep."""
        operators = self.operators[stretch.start : stretch.stop]
        image = self._images[stretch.start] = _Image(stretch.alone)
        made = {number: size for operator in operators for number, size in operator.made.items()}
        output = {number: made.pop(number) for number in operators[-1].gives if number in made}
        live = self.live + sum(output.values()) + (self.batch - 1) * image.kept_bytes
        for found, alone, before in zip(self.found[stretch.start :], image.found, image.before, strict=False):
            found.temporary = live + alone.temporary + before - (self.kept + self.batch * before)
            found.kept = self.batch * alone.kept
        for number, size in output.items():
            self.hold(number, size)
        self.live += self.batch * image.kept_bytes
        self.kept += self.batch * image.kept_bytes
        for index in range(stretch.start, stretch.stop):
            self.free_after(index, unless=made)

    def _backward_by_sample(self, stretch: Stretch) -> None:
        """The first image of the pass, with the whole gradients of output and input, and what all images keep."""
        operators, image = self.operators[stretch.start : stretch.stop], self._images.pop(stretch.start)
        inside = {operator.number for operator in operators}
        outward = [each for operator in operators for each in operator.passed if each.source not in inside]
        passed: list[tuple[PassedGradient, int]] = []
        kept, last = self.kept - self.batch * image.kept_bytes, operators[-1].number
        if self.gradients.at(last) and outward:
            passed = [(outward[0], self.gradients.new(outward[0].bytes))]
            for found, alone, after in zip(self.found[stretch.start :], image.found, image.before[1:], strict=False):
                if alone.backward is not None:
                    alive = self.live - image.kept_bytes + alone.backward + after
                    found.backward = alive - kept - self.batch * after
        self.live -= self.batch * image.kept_bytes
        self.kept = kept
        self.gradients.arrive(last, passed)


class _Image:
    """Both passes of one image through frozen operators; the image is a row of a feature map that is there anyway.

    Attributes:
        found: what operators take for that image.
        before: bytes that the operators before each one keep; and what all keep.
        kept_bytes: what an image keeps.
    """

    def __init__(self, operators: Sequence[OperatorTensors]) -> None:
        made = {number for operator in operators for number in operator.made}
        rows = {number: 0 for operator in operators for number in operator.reads if number not in made}
        step = StepMemory(operators, rows)
        step.forward()
        self.found, self.kept_bytes = step.found, step.kept
        step.backward(0)
        self.before = list(accumulate((each.kept for each in self.found), initial=0))
