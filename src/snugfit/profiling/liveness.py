"""The records of layers as a training step really has them: every tensor from the operator that makes it to its end.

Maps die after their last reader unless they are kept, and in the backward pass the gradients of maps come on top. A
step ends in a cross entropy.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from torch import fx

from snugfit.memory.activation import LayerRecord
from snugfit.profiling.block_members import Members
from snugfit.profiling.meta_profiler import IMAGE, Look
from snugfit.profiling.step import Part, Step

LOSS = "cross_entropy"
"""Name of the record of the loss, which belongs to the last block."""


def true_records(
    looks: Sequence[Look], members: Members, image_bytes: int, *, by_sample: Set[int] = frozenset(), batch: int = 1,
    int8: bool = False, spent: bool = False,
) -> list[LayerRecord]:  # fmt: skip
    """Follow a step through its operators.

    Args:
        looks: all operators, on the batch; those of sampled blocks on a single image too.
        members: their blocks.
        image_bytes: bytes of the batch.
        by_sample: numbers of the blocks that run one image at a time.
        batch: images.
        int8: whether frozen weights are stored as int8, and made floats while their layer runs.
        spent: whether the batch is freed when it is read; else it stays in the caller's hands.
    """
    looks, parts = _arranged(looks, members, by_sample if batch > 1 else frozenset())
    step = Step(looks, {IMAGE: image_bytes}, parts=parts, batch=batch, int8=int8, spent=spent)
    step.forward()
    output = looks[-1].output_bytes
    # The loss keeps logarithms of probabilities, beside which their gradient is made.
    temporary = step.live + output - step.cumulative
    loss = LayerRecord(LOSS, len(members.names) - 1, temporary, output, temporary + output)
    step.backward(output)
    records = [
        LayerRecord(
            _plain(str(each.node.target)), members.block[each.node], entry.temporary, entry.kept, entry.backward
        )
        for each, entry in zip(looks, step.entries, strict=True)
    ]
    return [*records, loss]


def sampled_nodes(members: Members, by_sample: Set[int]) -> frozenset[fx.Node]:
    """Operators of these blocks, without their side modules and what is made of those."""
    found: set[fx.Node] = set()
    beside: dict[fx.Node, int] = {}
    for node, number in members.block.items():
        if number not in by_sample:
            continue
        if node in members.side or any(beside.get(source) == number for source in node.all_input_nodes):
            beside[node] = number
        else:
            found.add(node)
    return frozenset(found)


def _arranged(looks: Sequence[Look], members: Members, by_sample: Set[int]) -> tuple[list[Look], list[Part]]:
    """Operators with those of each sampled stretch behind whatever lies between them, and the stretches."""
    stretch = _stretches(sampled_nodes(members, by_sample), members)
    last = {stretch[look.node]: place for place, look in enumerate(looks) if look.node in stretch}

    def place(item: tuple[int, Look]) -> tuple[int, int]:
        index, look = item
        return (last[stretch[look.node]] if look.node in stretch else index), index

    arranged = [look for _, look in sorted(enumerate(looks), key=place)]
    parts: list[Part] = []
    for index, look in enumerate(arranged):
        inside = look.node in stretch
        if inside and index and stretch.get(arranged[index - 1].node) == stretch[look.node]:
            parts[-1] = Part(parts[-1].start, index + 1, sampled=True)
        else:
            parts.append(Part(index, index + 1, sampled=inside))
    return arranged, parts


def _stretches(sampled: Set[fx.Node], members: Members) -> dict[fx.Node, int]:
    """The first block of the stretch that each sampled operator runs in.

    Neighbouring blocks run as one where nothing else reads the map between them (:func:`snugfit.lean.run_by_sample`).
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
