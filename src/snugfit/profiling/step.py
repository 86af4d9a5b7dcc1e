"""Which bytes are alive while a training step goes through its operators, forward and backward."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from snugfit.profiling.meta_profiler import Look, Passed


@dataclass
class Entry:
    """What one operator takes, as in ``memory.activation.LayerRecord``."""

    temporary: int = 0
    kept: int = 0
    backward: int | None = None


@dataclass(frozen=True)
class Part:
    """Consecutive operators, from ``start`` up to ``stop``; ``sampled`` where they run one image at a time."""

    start: int
    stop: int
    sampled: bool = False


class Step:
    """A step through operators.

    Args:
        looks: the operators on the batch, in order of execution.
        given: bytes of the maps that are there before.
        parts: stretches of operators in order; all as one by default.
        batch: images, which operators of a sampled part see one by one.
        int8: whether frozen weights are stored as int8, and made floats while their layer runs.
        spent: whether what was given is freed when it is read; else it stays in the caller's hands.

    Attributes:
        live: bytes alive now.
        cumulative: those of them that are kept for the backward pass.
        entries: one per operator.
    """

    def __init__(
        self, looks: Sequence[Look], given: Mapping[int, int], *, parts: Sequence[Part] = (), batch: int = 1,
        int8: bool = False, spent: bool = False,
    ) -> None:  # fmt: skip
        self.looks, self.int8, self.batch = looks, int8, batch
        self.parts = [each for part in parts or (Part(0, len(looks)),) for each in _single(part)]
        self.entries = [Entry() for _ in looks]
        self.live = self.cumulative = 0
        self.sizes = dict(given)
        self._users: Counter[int] = Counter()
        self._keeper: dict[int, int] = {}  # of a map: the first operator that keeps it
        self._dying = _dying(looks, () if spent else given)
        self._sampled: dict[int, _Sampled] = {}
        for number in given:
            self.hold(number)

    def forward(self) -> None:
        """Maps come alive where they are made, and die after their last reader unless they are kept."""
        for part in self.parts:
            if part.sampled:
                self._forward_by_sample(part)
            else:
                self._forward(part.start)

    def backward(self, output_bytes: int) -> None:
        """Gradients of maps come alive at their readers and die at their makers.

        Args:
            output_bytes: of the output's gradient, where it is new.
        """
        gradients = Gradients(self)
        gradients.begin(self.looks[-1], output_bytes)
        for part in reversed(self.parts):
            if part.sampled:
                self._backward_by_sample(part, gradients)
            else:
                self._backward(part.start, gradients)

    def _forward(self, index: int) -> None:
        look, entry = self.looks[index], self.entries[index]
        entry.temporary = self.live + look.forward_bytes + self._floats(look) - self.cumulative
        for number, size in look.made.items():
            self.sizes[number] = size
            self.hold(number)
        self._keep(index, look.kept, look.kept_inside)
        for number in self._dying.get(index, ()):
            self.let_go(number)

    def _backward(self, index: int, gradients: Gradients) -> None:
        look, entry = self.looks[index], self.entries[index]
        arrived = gradients.at(look.node)
        passed: list[tuple[Passed, int]] = []
        if look.flows and arrived:
            floats = self._floats(look) if look.passed else 0
            entry.backward = self.live + look.backward_bytes + floats - self.cumulative
            passed = [(each, gradients.passed(each, arrived)) for each in look.passed]
        kept = self.cumulative
        self._release(index, look.kept, look.kept_inside)
        gradients.arrive(look, passed)
        if entry.backward is not None:
            entry.backward = max(entry.backward, gradients.peak - kept)

    def _forward_by_sample(self, part: Part) -> None:
        """The last image of the batch, with the whole output in memory, and what all images keep."""
        looks = self.looks[part.start : part.stop]
        sampled = self._sampled[part.start] = _Sampled(looks, self.int8)
        made = {number: size for look in looks for number, size in look.made.items()}
        given = [number for number in looks[-1].gives if number in made]
        others = (self.batch - 1) * sampled.kept_bytes
        live = self.live + sum(made[number] for number in given) + others
        for index, (alone, before) in enumerate(zip(sampled.entries, sampled.before, strict=True), part.start):
            kept = self.cumulative + self.batch * before
            self.entries[index].temporary = live + alone.temporary + before - kept
            self.entries[index].kept = self.batch * alone.kept
        for number in given:
            self.sizes[number] = made[number]
            self.hold(number)
        self.live += self.batch * sampled.kept_bytes
        self.cumulative += self.batch * sampled.kept_bytes
        for index in range(part.start, part.stop):
            for number in self._dying.get(index, ()):
                if number in given or number not in made:
                    self.let_go(number)

    def _backward_by_sample(self, part: Part, gradients: Gradients) -> None:
        """The first image of the pass, with the whole gradients of output and input, and what all images keep."""
        looks, sampled = self.looks[part.start : part.stop], self._sampled.pop(part.start)
        inside = {look.node for look in looks}
        outward = [each for look in looks for each in look.passed if each.source not in inside]
        passed: list[tuple[Passed, int]] = []
        kept = self.cumulative - self.batch * sampled.kept_bytes
        if gradients.at(looks[-1].node) and outward:
            passed = [(outward[0], gradients.new(outward[0].bytes))]
            for index, (alone, after) in enumerate(zip(sampled.entries, sampled.after, strict=True), part.start):
                if alone.backward is not None:
                    alive = self.live - sampled.kept_bytes + alone.backward + after
                    self.entries[index].backward = alive - kept - self.batch * after
        self.live -= self.batch * sampled.kept_bytes
        self.cumulative = kept
        gradients.arrive(looks[-1], passed)

    def _floats(self, look: Look) -> int:
        """Bytes of the weights that are made floats while an operator runs."""
        return look.frozen_bytes if self.int8 else 0

    def _keep(self, index: int, numbers: Iterable[int], inside: int) -> None:
        kept = inside
        self.live += inside
        for number in numbers:
            if number not in self._keeper:
                self._keeper[number] = index
                self.hold(number)
                kept += self.sizes[number]
        self.entries[index].kept = kept
        self.cumulative += kept

    def _release(self, index: int, numbers: Iterable[int], inside: int) -> None:
        self.live -= inside
        self.cumulative -= self.entries[index].kept
        for number in numbers:
            if self._keeper[number] == index:
                self.let_go(number)

    def hold(self, number: int) -> None:
        """A map has one more user."""
        self._users[number] += 1
        if self._users[number] == 1:
            self.live += self.sizes[number]

    def let_go(self, number: int) -> None:
        """A map has one user less."""
        self._users[number] -= 1
        if self._users[number] == 0:
            self.live -= self.sizes[number]


class _Sampled:
    """Both passes of one image through frozen operators; the image is a row of a map that is there anyway.

    Attributes:
        entries: of that one image.
        before, after: bytes that the operators before each one keep, without and with its own.
        kept_bytes: what an image keeps.
    """

    def __init__(self, looks: Sequence[Look], int8: bool) -> None:
        alone = [look.alone for look in looks if look.alone is not None]
        made = {number for look in alone for number in look.made}
        rows = {number: 0 for look in alone for number in look.reads if number not in made}
        step = Step(alone, rows, int8=int8)
        step.forward()
        self.entries, self.kept_bytes = step.entries, step.cumulative
        step.backward(0)
        self.before = [sum(entry.kept for entry in self.entries[:index]) for index in range(len(alone))]
        self.after = [before + entry.kept for before, entry in zip(self.before, self.entries, strict=True)]


def _single(part: Part) -> list[Part]:
    return [part] if part.sampled else [Part(index, index + 1) for index in range(part.start, part.stop)]


class Gradients:
    """Gradients of maps on their way, as autograd hands them on and sums them up.

    Attributes:
        peak: the most that was alive while gradients were summed last.
    """

    def __init__(self, step: Step) -> None:
        self.step, self.peak = step, 0
        self._of: dict[fx.Node, dict[fx.Node | None, int]] = {}  # memory per part of an output; None is all of it
        self._users: Counter[int] = Counter()
        self._sizes: list[int] = []

    def begin(self, last: Look, size: int) -> None:
        """The gradient of the last output comes from elsewhere."""
        if last.flows:
            self._of[last.node] = {None: self.new(size)}

    def at(self, node: fx.Node) -> list[int]:
        """Memory of the gradient that has come to an operator; none where none has."""
        return list(self._of.get(node, {}).values())

    def passed(self, each: Passed, arrived: list[int]) -> int:
        """Memory of a gradient that is passed back."""
        if not each.handed:
            return self.new(each.bytes)
        self._users[arrived[0]] += 1
        return arrived[0]

    def arrive(self, look: Look, passed: Iterable[tuple[Passed, int]]) -> None:
        """The gradient of an operator's output is freed, and what it passed is added to what others did."""
        self.peak = self.step.live
        for memory in self._of.pop(look.node, {}).values():
            self._drop(memory)
        part = look.node if look.node.target is operator.getitem else None
        for each, memory in passed:
            there = self._of.setdefault(each.source, {})
            if part not in there:
                there[part] = memory
                continue
            if self._users[there[part]] > 1:  # somebody else reads it: the sum needs memory of its own
                other, there[part] = there[part], self.new(each.bytes)
                self._drop(other)
            self._drop(memory)

    def new(self, size: int) -> int:
        """Memory for a gradient."""
        self._sizes.append(size)
        self._users[len(self._sizes) - 1] = 1
        self.step.live += size
        self.peak = max(self.peak, self.step.live)
        return len(self._sizes) - 1

    def _drop(self, memory: int) -> None:
        self._users[memory] -= 1
        if self._users[memory] == 0:
            self.step.live -= self._sizes[memory]


def _dying(looks: Sequence[Look], held: Iterable[int]) -> dict[int, list[int]]:
    """Per operator, the maps of which it is the last reader; what is held and the last output never die."""
    last: dict[int, int] = {}
    for index, look in enumerate(looks):
        for number in (*look.reads, *look.gives):
            last[number] = index
    for number in (*held, *looks[-1].gives):
        last.pop(number, None)
    dying: dict[int, list[int]] = {}
    for number, index in last.items():
        dying.setdefault(index, []).append(number)
    return dying
