"""Records of layers by liveness: every tensor of a training step from the operator that makes it to its end.

Feature maps die after their last reader unless they are kept, and in the backward pass gradients of feature maps are
added. A step ends in a cross entropy.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

from snugfit.memory.activation import LayerRecord
from snugfit.memory.liveness import OperatorTensors
from snugfit.profiling.block_members import Members
from snugfit.profiling.meta_profiler import IMAGE, MetaOperator
from snugfit.profiling.sampled_step import SampledStep, Stretch

LOSS = "cross_entropy"
"""Name of the record of the loss, which belongs to the last block."""


@dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Attributes:
        batch: images of a step.
        state_copies: floats of optimizer state per trained weight: 2 for Adam.
        holds_gradients: whether gradients accumulate over micro-batches; else each is applied and freed at once.
        by_sample: numbers of frozen blocks that run one image at a time (for a module that does not do so yet).
        int8: whether frozen weights of convolutions and linear layers are stored as int8 (for a module whose weights
            are not yet).
        spent: whether the batch is freed after its last reader (for a module that does not do so yet:
            :func:`snugfit.lean.release_images`); else it stays in memory for the whole step.
    """

    batch: int = 1
    state_copies: int = 2
    holds_gradients: bool = False
    by_sample: Set[int] = frozenset()
    int8: bool = False
    spent: bool = False


def liveness_records(
    operators: Sequence[MetaOperator], members: Members, image_bytes: int, options: StepOptions
) -> list[LayerRecord]:
    """Follow a step through its operators.

    Args:
        operators: all operators, on the batch; those of sampled blocks on a single image too.
        members: their blocks.
        image_bytes: bytes of the batch.
        options: how the step runs.
    """
    batch, int8 = options.batch, options.int8
    by_sample = options.by_sample if batch > 1 else frozenset()
    operators, stretches = _arranged(operators, members, by_sample, int8=int8)
    tensors = [_with_floats(each.tensors, each.frozen_bytes if int8 else 0) for each in operators]
    step = SampledStep(tensors, {IMAGE: image_bytes}, stretches, batch, spent=options.spent)
    step.forward()
    output = operators[-1].output_bytes
    # The loss keeps logarithms of probabilities while their gradient is computed.
    temporary = step.live + output - step.kept
    loss = LayerRecord(LOSS, len(members.names) - 1, temporary, output, temporary + output)
    step.backward(output)
    records = [
        LayerRecord(
            _plain(str(each.node.target)), members.block[each.node], found.temporary, found.kept, found.backward
        )
        for each, found in zip(operators, step.found, strict=True)
    ]
    return [*records, loss]


def _with_floats(tensors: OperatorTensors, frozen_bytes: int) -> OperatorTensors:
    """An operator whose frozen weights (K, ...) are converted to floats while it runs."""
    return replace(
        tensors,
        forward_scratch=tensors.forward_scratch + frozen_bytes,
        backward_scratch=tensors.backward_scratch + (frozen_bytes if tensors.passed else 0),
    )


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
    operators: Sequence[MetaOperator], members: Members, by_sample: Set[int], *, int8: bool
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
        alone = (
            ()
            if first is None
            else tuple(
                _with_floats(each.alone, each.frozen_bytes if int8 else 0) for each in inside if each.alone is not None
            )
        )
        found.append(Stretch(indices[0], indices[-1] + 1, alone))
    return arranged, found


def _stretches(sampled: Set[fx.Node], members: Members) -> dict[fx.Node, int]:
    """The first block of the stretch that each sampled operator runs in.

    Neighbouring blocks run as one if nothing else reads the feature map between them
    (:func:`snugfit.lean.run_per_sample`).
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
