"""The records of layers as a training step really has them: every tensor from the operator that makes it to its end.

Maps die after their last reader unless they are kept, the batch stays in the caller's hands, and in the backward pass
the gradients of maps come on top. A step ends in a cross entropy.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from snugfit.memory.activation import LayerRecord
from snugfit.profiling.looking import IMAGE, Look, Passed
from snugfit.profiling.members import Members

LOSS = "cross_entropy"
"""Name of the record of the loss, which belongs to the last block."""


@dataclass
class _Entry:
    """A record in the making."""

    temporary: int = 0
    kept: int = 0
    backward: int | None = None


def true_records(looks: Sequence[Look], members: Members, image_bytes: int, *, int8: bool = False) -> list[LayerRecord]:
    """Follow a step through its operators.

    Args:
        looks: all operators, on the batch.
        members: their blocks.
        image_bytes: bytes of the batch.
        int8: whether frozen weights are stored as int8, and made floats while their layer runs.
    """
    step = _Step(looks, image_bytes, int8=int8)
    step.forward()
    step.loss()
    step.backward()
    last = len(members.names) - 1
    named = [*((str(look.node.target), members.block[look.node]) for look in looks), (LOSS, last)]
    return [
        LayerRecord(_plain(name), block, entry.temporary, entry.kept, entry.backward)
        for (name, block), entry in zip(named, step.entries, strict=True)
    ]


def _plain(target: str) -> str:
    """``<built-in function add>`` -> ``add``."""
    return target.removeprefix("<built-in function ").split(" at ")[0].removeprefix("<function ").removesuffix(">")


class _Step:
    """Which bytes are alive while a step goes through its operators.

    Attributes:
        live: bytes alive now.
        cumulative: those of them that are kept for the backward pass.
        entries: one per operator, and the loss.
    """

    def __init__(self, looks: Sequence[Look], image_bytes: int, *, int8: bool) -> None:
        self.looks, self.int8 = looks, int8
        self.entries = [_Entry() for _ in (*looks, LOSS)]
        self.live = self.cumulative = 0
        self.output_bytes = looks[-1].output_bytes
        self._sizes = {IMAGE: image_bytes}
        self._users: Counter[int] = Counter()
        self._keeper: dict[int, int] = {}  # of a map: the first operator that keeps it
        self._hold(IMAGE)

    def forward(self) -> None:
        """Maps come alive where they are made, and die after their last reader unless they are kept."""
        dying = _dying(self.looks)
        for index, look in enumerate(self.looks):
            entry = self.entries[index]
            entry.temporary = self.live + look.forward_bytes + self._floats(look) - self.cumulative
            for number, size in look.made.items():
                self._sizes[number] = size
                self._hold(number)
            self._keep(index, look)
            for number in dying.get(index, ()):
                self._let_go(number)

    def loss(self) -> None:
        """It keeps logarithms of probabilities; the logits stay in the caller's hands."""
        self.entries[-1] = _Entry(self.live + self.output_bytes - self.cumulative, self.output_bytes)
        self.live += self.output_bytes
        self.cumulative += self.output_bytes
        self.entries[-1].backward = self.live + 2 * self.output_bytes - self.cumulative
        self.live -= self.output_bytes
        self.cumulative -= self.output_bytes

    def backward(self) -> None:
        """Gradients of maps come alive at their readers and die at their makers."""
        gradients = _Gradients(self)
        gradients.begin(self.looks[-1])
        for index in range(len(self.looks) - 1, -1, -1):
            look, entry = self.looks[index], self.entries[index]
            arrived = gradients.at(look.node)
            if look.flows and arrived:
                floats = self._floats(look) if look.passed else 0
                entry.backward = self.live + look.backward_bytes + floats - self.cumulative
                passed = [(each, gradients.passed(each, arrived)) for each in look.passed]
            else:
                passed = []
            before = self.cumulative
            self._release(index, look)
            gradients.arrive(look, passed)
            if entry.backward is not None:
                entry.backward = max(entry.backward, gradients.peak - before)

    def _floats(self, look: Look) -> int:
        """Bytes of the weights that are made floats while an operator runs."""
        return look.frozen_bytes if self.int8 else 0

    def _keep(self, index: int, look: Look) -> None:
        kept = look.kept_inside
        self.live += look.kept_inside
        for number in look.kept:
            if number not in self._keeper:
                self._keeper[number] = index
                self._hold(number)
                kept += self._sizes[number]
        self.entries[index].kept = kept
        self.cumulative += kept

    def _release(self, index: int, look: Look) -> None:
        self.live -= look.kept_inside
        self.cumulative -= self.entries[index].kept
        for number in look.kept:
            if self._keeper[number] == index:
                self._let_go(number)

    def _hold(self, number: int) -> None:
        self._users[number] += 1
        if self._users[number] == 1:
            self.live += self._sizes[number]

    def _let_go(self, number: int) -> None:
        self._users[number] -= 1
        if self._users[number] == 0:
            self.live -= self._sizes[number]


class _Gradients:
    """Gradients of maps on their way, as autograd hands them on and sums them up.

    Attributes:
        peak: the most that was alive while gradients were summed last.
    """

    def __init__(self, step: _Step) -> None:
        self.step, self.peak = step, 0
        self._of: dict[fx.Node, dict[fx.Node | None, int]] = {}  # memory per part of an output; None is all of it
        self._users: Counter[int] = Counter()
        self._sizes: list[int] = []

    def begin(self, last: Look) -> None:
        """The gradient of the network's output comes from the loss."""
        if last.flows:
            self._of[last.node] = {None: self._new(last.output_bytes)}

    def at(self, node: fx.Node) -> list[int]:
        """Memory of the gradient that has come to an operator; none where none has."""
        return list(self._of.get(node, {}).values())

    def passed(self, each: Passed, arrived: list[int]) -> int:
        """Memory of a gradient that is passed back."""
        if not each.handed:
            return self._new(each.bytes)
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
                other, there[part] = there[part], self._new(each.bytes)
                self._drop(other)
            self._drop(memory)

    def _new(self, size: int) -> int:
        self._sizes.append(size)
        self._users[len(self._sizes) - 1] = 1
        self.step.live += size
        self.peak = max(self.peak, self.step.live)
        return len(self._sizes) - 1

    def _drop(self, memory: int) -> None:
        self._users[memory] -= 1
        if self._users[memory] == 0:
            self.step.live -= self._sizes[memory]


def _dying(looks: Sequence[Look]) -> dict[int, list[int]]:
    """Per operator, the maps of which it is the last reader, or which nobody reads; the network's output never dies."""
    last: dict[int, int] = {}
    for index, look in enumerate(looks):
        for number in (*look.reads, *look.gives):
            last[number] = index
    for number in (IMAGE, *looks[-1].gives):
        last.pop(number, None)
    dying: dict[int, list[int]] = {}
    for number, index in last.items():
        dying.setdefault(index, []).append(number)
    return dying
