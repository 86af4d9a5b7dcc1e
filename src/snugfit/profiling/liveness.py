"""Records of layers by liveness: every tensor of a training step from the operator that makes it to its end.

Feature maps die after their last reader unless they are kept, and in the backward pass gradients of feature maps are
added. A step ends in a cross entropy. Some frozen blocks may run one image at a time.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from torch import fx

from snugfit._chain import find_blocks
from snugfit._chain.blocks import is_side
from snugfit.memory.activation import LayerRecord
from snugfit.memory.liveness import OperatorTensors, PassedGradient, StepMemory
from snugfit.profiling.meta_profiler import IMAGE, MetaOperator


@dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Attributes:
        batch: images of a step.
        state_copies: bytes of optimizer state per byte of trained weights: 2 for Adam.
        holds_gradients: whether gradients accumulate over micro-batches; else each is applied and freed at once.
        by_sample: numbers of frozen blocks that run one image at a time (for a module that does not do so yet).
        int8: whether frozen weights of convolutions and linear layers are stored as int8 (for a module whose weights
            are not yet).
        spent: whether the batch is freed after its last reader (for a module that does not do so yet:
            :func:`snugfit.lean.release_images`); else it stays in memory for the whole step.
    """

    batch: int = 1
    state_copies: float = 2
    holds_gradients: bool = False
    by_sample: Set[int] = frozenset()
    int8: bool = False
    spent: bool = False


def liveness_records(
    operators: Sequence[MetaOperator], members: Members, image_bytes: int, options: StepOptions
) -> list[LayerRecord]:
    """Follow a step through its operators on a batch; those of sampled blocks ran on a single image too."""
    if options.int8:
        operators = [_with_floats(each) for each in operators]
    operators, stretches = _arranged(operators, members, options.by_sample if options.batch > 1 else frozenset())
    tensors = [each.tensors for each in operators]
    step = SampledStep(tensors, {IMAGE: image_bytes}, stretches, options.batch, spent=options.spent)
    step.forward()
    output = operators[-1].output_bytes
    # The loss keeps logarithms of probabilities while their gradient is computed.
    temporary = step.live + output - step.kept
    loss = LayerRecord("cross_entropy", len(members.names) - 1, temporary, output, temporary + output)
    step.backward(output)
    records = [
        LayerRecord(
            _plain(str(each.node.target)), members.block[each.node], found.temporary, found.kept, found.backward
        )
        for each, found in zip(operators, step.found, strict=True)
    ]
    return [*records, loss]


def _with_floats(each: MetaOperator) -> MetaOperator:
    """An operator whose frozen weights are converted to floats while it runs."""

    def longer(tensors: OperatorTensors) -> OperatorTensors:
        return replace(
            tensors,
            forward_scratch=tensors.forward_scratch + each.frozen_bytes,
            backward_scratch=tensors.backward_scratch + (each.frozen_bytes if tensors.passed else 0),
        )

    return replace(each, tensors=longer(each.tensors), alone=longer(each.alone) if each.alone else None)


def sampled_nodes(members: Members, by_sample: Set[int]) -> frozenset[fx.Node]:
    """Operators of these blocks, without their side modules and the readers of those."""
    found: set[fx.Node] = set()
    side: dict[fx.Node, int] = {}
    for node, number in members.block.items():
        if number not in by_sample:
            continue
        if node in members.side or any(side.get(source) == number for source in node.all_input_nodes):
            side[node] = number
        else:
            found.add(node)
    return frozenset(found)


def _arranged(
    operators: Sequence[MetaOperator], members: Members, by_sample: Set[int]
) -> tuple[list[MetaOperator], list[Stretch]]:
    """Operators, with those of each sampled stretch moved behind the operators between them; and the stretches."""
    stretch = _stretches(sampled_nodes(members, by_sample), members)
    last = {stretch[each.node]: place for place, each in enumerate(operators) if each.node in stretch}

    def place(item: tuple[int, MetaOperator]) -> tuple[int, int]:
        index, each = item
        return (last[stretch[each.node]] if each.node in stretch else index), index

    arranged = [each for _, each in sorted(enumerate(operators), key=place)]
    found: list[Stretch] = []
    for first, group in groupby(enumerate(arranged), key=lambda item: stretch.get(item[1].node)):
        indices, inside = zip(*group, strict=True)
        alone = () if first is None else tuple(each.alone for each in inside if each.alone is not None)
        found.append(Stretch(indices[0], indices[-1] + 1, alone))
    return arranged, found


def _stretches(sampled: Set[fx.Node], members: Members) -> dict[fx.Node, int]:
    """The first block of the stretch that each sampled operator runs in.

    Neighbouring blocks run as one if nothing else reads the feature map between them (``lean.run_per_sample``).
    """
    first: dict[int, int] = {}
    for number in sorted({members.block[node] for node in sampled}):
        entry = members.entries[number]
        readers = {user for user in entry.users if user in sampled and members.block[user] == number}
        alone = entry in sampled and members.block[entry] == number - 1 and set(entry.users) == readers
        first[number] = first[number - 1] if alone else number
    return {node: first[members.block[node]] for node in sampled}


def _plain(target: str) -> str:
    """``<built-in function add>`` -> ``add``."""
    return target.removeprefix("<built-in function ").split(" at ")[0].removeprefix("<function ").removesuffix(">")


@dataclass(frozen=True)
class Members:
    """Operators and their blocks.

    Attributes:
        names: of the blocks.
        block: number of the block of every operator.
        side: those operators that belong to a side module.
        entries: for each block, the operator whose output enters it, or the network's input.
        residual: numbers of the blocks whose input is read in more than one place, not counting its side module.
    """

    names: tuple[str, ...]
    block: dict[fx.Node, int]
    side: frozenset[fx.Node]
    entries: tuple[fx.Node, ...]
    residual: frozenset[int]


def find_members(module: fx.GraphModule, input_shape: tuple[int, ...]) -> Members:
    """Find the blocks of a traced network, with or without a side network, numbered as by ``find_blocks``."""
    blocks = find_blocks(module, input_shape)
    block = {node: number for number, part in enumerate(blocks) for node in part.nodes}
    side = frozenset(node for node in block if is_side(node))
    return Members(
        names=tuple(part.name for part in blocks),
        block=block,
        side=side,
        entries=tuple(part.entry for part in blocks),
        residual=frozenset(
            number for number, part in enumerate(blocks) if len(part.entry.users.keys() & (set(part.nodes) - side)) > 1
        ),
    )


@dataclass(frozen=True)
class Stretch:
    """Consecutive operators from ``start`` to before ``stop``; ``alone`` on one image, if they run one at a time."""

    start: int
    stop: int
    alone: tuple[OperatorTensors, ...] = ()


class SampledStep(StepMemory):
    """Follows a step through its operators, all of them in stretches; sampled ones run one image at a time."""

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

    ``found`` is what operators take for it, ``before`` what those before each one keep, ``kept_bytes`` what all keep.
    """

    def __init__(self, operators: Sequence[OperatorTensors]) -> None:
        made = {number for operator in operators for number in operator.made}
        rows = {number: 0 for operator in operators for number in operator.reads if number not in made}
        step = StepMemory(operators, rows)
        step.forward()
        self.found, self.kept_bytes = step.found, step.kept
        step.backward(0)
        self.before = list(accumulate((each.kept for each in self.found), initial=0))
