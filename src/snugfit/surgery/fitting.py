"""Pruned widths that fit activation memory (Yoosefi et al., sections III and V): a target per block, or a bound on all.

Temporary memory is needed while a layer runs, cumulative memory for the backward passes of the layers so far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch import fx

from snugfit.errors import ModelError, UsageError
from snugfit.memory.activation import ActivationMemory
from snugfit.surgery.channels import width
from snugfit.surgery.hidden import blocks_of, hidden_groups, narrowed_meta_copy

Profiler = Callable[[fx.GraphModule], ActivationMemory]
"""Activation memory of a network on the meta device, with ``find_blocks``' blocks."""
Widths = Mapping[str, int]
"""Channels of each group, by the group's name."""


def widths_for(
    module: fx.GraphModule,
    input_shape: tuple[int, ...],
    profile: Profiler,
    target: int,
    *,
    blocks: Collection[int] | None = None,
) -> dict[str, int]:
    """The smallest pruning ratios that bring every block's temporary memory to a target (Yoosefi et al., section V).

    Args:
        module: a traced network with torch's own layers, possibly on meta; it is not changed.
        input_shape: channels, height, width of one image.
        profile: returns the temporary memory of each block, equation (5).
        target: bytes; the paper takes the overall cumulative gradient memory before pruning.
        blocks: those that must reach the target; all if None.

    Returns:
        The width of each group of ``hidden_groups`` that loses channels, by the group's name.

    Raises:
        ModelError: a block cannot reach the target; the message contains the smallest value.
    """
    pruning = _Pruning(module, input_shape, profile)
    carriers: dict[int, list[str]] = {}
    for name, (first, last) in pruning.spans.items():
        for block in range(first, last + 1):
            carriers.setdefault(block, []).append(name)

    def temporary(widths: Widths) -> list[int]:
        return [block.temporary_bytes for block in pruning.profile(widths).blocks]

    return widest_widths(pruning.before, carriers, temporary, target, blocks)


def widest_widths(
    before: Widths,
    carriers: Mapping[int, Sequence[str]],
    temporary: Callable[[Widths], Sequence[int]],
    target: int,
    blocks: Collection[int] | None = None,
) -> dict[str, int]:
    """The search of :func:`widths_for`, for any memory model (section V, step 2).

    A block with several groups first shrinks them by one ratio, as little as possible. Then every group grows, in
    order, as far as the target allows, so that no width could be larger with the others unchanged.

    Args:
        before: channels of every group that may be pruned.
        carriers: groups whose channels each block's layers read or make, by block; a group may belong to two blocks.
        temporary: bytes of each block for any widths; they must not fall as a width grows.
        target, blocks: as for :func:`widths_for`.

    Raises:
        ModelError: a block cannot reach the target; the message contains the smallest value.
    """
    widths = dict(before)
    search = _Search(before, temporary, target, temporary(dict.fromkeys(before, 1)))
    above = [at for at, needed in enumerate(temporary(before)) if needed > target and (blocks is None or at in blocks)]
    for block in above:
        widths = search.shrunk_to_target(widths, block, [name for name in carriers.get(block, ()) if name in before])
    for name in before:
        if widths[name] < before[name]:
            widths = search.grown(widths, name, [block for block in above if name in carriers.get(block, ())])
    return {name: channels for name, channels in widths.items() if channels < before[name]}


@dataclass(frozen=True)
class _Search:
    """The search of ``widest_widths``; ``least`` is the memory of every block with one channel in each group."""

    before: Widths
    temporary: Callable[[Widths], Sequence[int]]
    target: int
    least: Sequence[int]

    def shrunk_to_target(self, widths: dict[str, int], block: int, names: Sequence[str]) -> dict[str, int]:
        """Widths with one more block at the target: one ratio for those of its groups that are not narrower yet."""
        least, before = self.least[block], self.before
        if least > self.target:
            raise ModelError(
                f"block {block} needs at least {least} bytes with any pruning, more than the target of {self.target}."
            )
        ratios = sorted({channels / before[name] for name in names for channels in range(1, before[name] + 1)}) or [1.0]

        def shrunk(index: int) -> dict[str, int]:
            return widths | {name: min(widths[name], max(1, int(ratios[index] * before[name]))) for name in names}

        def excess(index: int) -> int:
            return self.excess(shrunk(index), [block]) if index else least - self.target

        return shrunk(_last(excess, 0, len(ratios) - 1))

    def grown(self, widths: dict[str, int], name: str, blocks: Sequence[int]) -> dict[str, int]:
        """Widths with one group as wide as the target of these blocks allows."""
        own = widths[name]

        def excess(channels: int) -> int:
            return self.excess(widths | {name: channels}, blocks)

        return widths | {name: own if excess(own + 1) > 0 else _last(excess, own + 1, self.before[name])}

    def excess(self, widths: Widths, blocks: Sequence[int]) -> int:
        needed = self.temporary(widths)
        return max(needed[block] for block in blocks) - self.target


def _last(excess: Callable[[int], int], low: int, high: int) -> int:
    """The last index from ``low`` to ``high`` without excess; there is none at ``low``, and it never falls.

    It interpolates linearly, because memory is nearly linear in a width: that needs fewer profiles than bisection,
    which every third step uses in case of bends.
    """
    below, above, tries = excess(low), excess(high), 0
    if above <= 0:
        return high
    while high - low > 1:
        tries += 1
        guess = low + (high - low) * -below // (above - below) if tries % 3 else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        found = excess(guess)
        if found > 0:
            high, above = guess, found
        else:
            low, below = guess, found
    return low


def kept_width(channels: int, ratio: float, layer: str) -> int:
    """Number of channels that remain after pruning by a ratio, rounded.

    Raises:
        ModelError: the ratio is not in [0, 1), or leaves no channel of the layer.
    """
    if not 0 <= ratio < 1:
        raise ModelError(f"a pruning ratio must be at least 0 and below 1, not {ratio:g} for layer {layer}.")
    left = round(channels * (1 - ratio))
    if not left:
        raise ModelError(f"a pruning ratio of {ratio:g} would empty layer {layer}, which has {channels} channels.")
    return left


def best_widths(
    module: fx.GraphModule,
    input_shape: tuple[int, ...],
    profile: Profiler,
    bound: int,
    loss: Callable[[str, int], float],
    steps: int = 16,
) -> dict[str, int]:
    """The widths of least loss within a bound on the peak activation memory, over all blocks together.

    Every block may keep 1 to ``steps`` parts of ``steps`` of the channels that are made in it; among those choices the
    result is the best.

    Args:
        module, input_shape: as for :func:`widths_for`.
        profile: returns peak and cumulative memory of each block, equations (2) and (6).
        bound: limit for the peak, equation (1), in bytes.
        loss: what a group's width costs in accuracy, by the group's name; nothing for the full one.
        steps: number of choices per block.

    Raises:
        ModelError: nothing fits; the message contains the smallest possible peak.
    """
    if steps < 1:
        raise UsageError(f"a block needs one choice of width at least, not {steps}.")
    pruning = _Pruning(module, input_shape, profile)
    found = choose_widths(pruning.options(loss, steps), bound)
    widths = {name: w for block, at in enumerate(found.choices) for name, w in pruning.widths(block, at, steps).items()}
    return {name: channels for name, channels in widths.items() if channels < pruning.before[name]}


class _Pruning:
    """A network's hidden channels, and its memory at other widths."""

    def __init__(self, module: fx.GraphModule, input_shape: tuple[int, ...], profile: Profiler) -> None:
        self.module, self._profile = module, profile
        self.groups = [group for found in hidden_groups(module, input_shape).values() for group in found]
        self.spans = blocks_of(module, input_shape, self.groups)
        self.before = {group.name: width(module, group) for group in self.groups}
        self._known: dict[tuple[tuple[str, int], ...], ActivationMemory] = {}

    def profile(self, widths: Widths) -> ActivationMemory:
        key = tuple(sorted((name, channels) for name, channels in widths.items() if channels < self.before[name]))
        if key not in self._known:
            self._known[key] = self._profile(narrowed_meta_copy(self.module, self.groups, dict(key)))
        return self._known[key]

    def widths(self, block: int, choice: int, steps: int) -> dict[str, int]:
        """Widths of the groups that a block makes, for one of ``steps`` choices, the narrowest first."""
        names = [name for name, (first, _) in self.spans.items() if first == block]
        return {name: max(1, self.before[name] * (choice + 1) // steps) for name in names}

    def options(self, loss: Callable[[str, int], float], steps: int) -> list[WidthOptions]:
        """Costs of every block for each of its choices, and for each choice of the block that it reads."""
        blocks = range(len(self.profile({}).blocks))
        own = [steps if self.widths(block, 0, steps) else 1 for block in blocks]
        read = [any(first < block == last for first, last in self.spans.values()) for block in blocks]
        found = []
        for block in blocks:
            rows = own[block - 1] if read[block] else 1
            costs = np.array(
                [[self._costs(block, row, at, rows, steps) for at in range(own[block])] for row in range(rows)]
            )
            widths = [self.widths(block, at, steps) for at in range(own[block])]
            losses = [sum(loss(name, channels) for name, channels in chosen.items()) for chosen in widths]
            found.append(WidthOptions(np.array(losses, np.float64), costs[..., 0], costs[..., 1]))
        return found

    def _costs(self, block: int, before: int, own: int, rows: int, steps: int) -> tuple[int, int]:
        """Peak above the memory saved before a block, and what it saves, by the previous block's choice and its own.

        All blocks alternate between these choices, so that one profile serves every block.
        """
        turns = (own, before if rows > 1 else own)
        every = range(max(last for _, last in self.spans.values()) + 1) if self.spans else ()
        widths = {n: w for at in every for n, w in self.widths(at, turns[(at - block) % 2], steps).items()}
        memory = self.profile(widths).blocks
        saved = memory[block - 1].cumulative_bytes if block else 0
        return memory[block].peak_bytes - saved, memory[block].cumulative_bytes - saved


@dataclass(frozen=True)
class WidthOptions:
    """The possible widths of a block, and what each costs.

    Attributes:
        loss: what each of its J choices costs in accuracy, (J,).
        peak: bytes that the block needs at its worst layer, above what blocks before it have saved, (I, J): by the
            choice of the block before, which decides how wide its input is, and by its own. I is 1 where the former
            makes no difference.
        saved: bytes that the block adds to the cumulative memory, (I, J).
    """

    loss: NDArray[np.float64]
    peak: NDArray[np.int64]
    saved: NDArray[np.int64]


@dataclass(frozen=True)
class WidthChoice:
    """The choices of some blocks from the first, by index; the sum of their losses.

    ``peak`` and ``saved`` are the peak (equation 1) and cumulative memory (equation 3) so far, in bytes.
    """

    choices: tuple[int, ...] = ()
    loss: float = 0.0
    peak: int = 0
    saved: int = 0


def choose_widths(blocks: Sequence[WidthOptions], bound: int) -> WidthChoice:
    """The choices of least loss whose peak activation memory, equations (1) to (3), is within a bound: exact.

    A block's peak adds to the memory saved by all blocks before it, so pruning one also lowers the peaks of later ones.
    Partial choices are kept as labels, separately for each choice of the last block; a label that
    saves no less and loses no less than another is dropped, because whatever completes it completes the other at least
    as well. Among equal losses the peak is not minimised.

    Raises:
        ModelError: nothing fits; the message contains the smallest possible peak.
    """
    ends = _search(blocks, lambda label: label.loss, bound)
    if not ends:
        raise ModelError(f"no choice of widths fits {bound} bytes; the smallest peak is {smallest_peak(blocks)} bytes.")
    return min(ends, key=lambda label: (label.loss, label.peak))


def smallest_peak(blocks: Sequence[WidthOptions]) -> int:
    """The smallest peak activation memory of all choices, in bytes."""
    return min(label.peak for label in _search(blocks, lambda label: label.peak, None))


def _search(
    blocks: Sequence[WidthOptions], cost: Callable[[WidthChoice], float], bound: int | None
) -> list[WidthChoice]:
    """Choices for all blocks that no other beats in both saved bytes and cost."""
    labels = [[WidthChoice()]]
    for at, block in enumerate(blocks):
        extended = [_extended(labels, block, own) for own in range(len(block.loss))]
        if at + 1 == len(blocks) or len(blocks[at + 1].peak) == 1:
            extended = [list(chain.from_iterable(extended))]  # the last choice makes no difference to the next block
        labels = [_undominated(found, cost, bound) for found in extended]
    return list(chain.from_iterable(labels))


def _extended(labels: list[list[WidthChoice]], block: WidthOptions, own: int) -> list[WidthChoice]:
    """Extend every label by one block's choice; labels are separated by the choice of the block before."""
    found = []
    for before, ending in enumerate(labels):
        row = before if len(block.peak) > 1 else 0
        peak, saved = int(block.peak[row, own]), int(block.saved[row, own])
        for label in ending:
            highest, loss = max(label.peak, label.saved + peak), label.loss + float(block.loss[own])
            found.append(WidthChoice((*label.choices, own), loss, highest, label.saved + saved))
    return found


def _undominated(
    labels: list[WidthChoice], cost: Callable[[WidthChoice], float], bound: int | None
) -> list[WidthChoice]:
    """The labels within the bound that no other equals or beats in both saved bytes and cost."""
    kept: list[WidthChoice] = []
    fitting = (label for label in labels if bound is None or label.peak <= bound)
    for label in sorted(fitting, key=lambda label: (label.saved, cost(label))):
        if not kept or cost(label) < cost(kept[-1]):
            kept.append(label)
    return kept
