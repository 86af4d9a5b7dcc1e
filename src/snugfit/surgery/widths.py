"""Numbers of channels that bring blocks' temporary memory to a target. Pure arithmetic.

Memory is activation memory as in Yoosefi et al., section III: temporary memory is needed while a layer runs, cumulative
memory for the backward passes of the layers so far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from snugfit.errors import ModelError

Widths = Mapping[str, int]
"""Channels of each group, by the group's name."""


def sensitive_blocks(temporary: Sequence[int], cumulative: int) -> tuple[int, ...]:
    """Blocks whose temporary memory is above the overall cumulative gradient memory (section V, step 1).

    Args:
        temporary: bytes of each block, equation (5).
        cumulative: bytes of the last block, equation (6).
    """
    return tuple(index for index, needed in enumerate(temporary) if needed > cumulative)


def pruning_ratios(before: Widths, after: Widths) -> dict[str, float]:
    """Share of removed channels by group: the paper's pruning ratios."""
    return {name: 1 - after[name] / before[name] for name in after}


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


def widest_widths(
    before: Widths,
    carriers: Mapping[int, Sequence[str]],
    temporary: Callable[[Widths], Sequence[int]],
    target: int,
    multiple: int = 1,
    blocks: Collection[int] | None = None,
) -> dict[str, int]:
    """The smallest pruning ratios that bring every sensitive block's temporary memory to a target (section V, step 2).

    A block with several groups first shrinks them by one ratio, as little as possible. Then every group grows, in
    order, as far as the target allows, so that no width could be larger with the others unchanged.

    Args:
        before: channels of every group that may be pruned.
        carriers: groups whose channels each block's layers read or make, by block. (A group between two blocks belongs
            to both.)
        temporary: bytes of each block for any widths; they must not fall as a width grows.
        target: bytes; the paper takes the overall cumulative gradient memory before pruning.
        multiple: widths are rounded down to a multiple of this, for kernels that need it; 1 for exact ones.
        blocks: those that must reach the target; all if None.

    Returns:
        The width of each group that loses channels.

    Raises:
        ModelError: a block cannot reach the target; the message contains the smallest value.
    """
    steps = {name: [*range(multiple, channels, multiple), channels] for name, channels in before.items()}
    widths = dict(before)
    least = temporary({name: found[0] for name, found in steps.items()})
    search = _Search(before, steps, temporary, target, least)
    sensitive = [at for at in sensitive_blocks(temporary(before), target) if blocks is None or at in blocks]
    for block in sensitive:
        names = [name for name in carriers.get(block, ()) if name in before]
        widths = search.shrunk_to_target(widths, block, names)
    for name in before:
        if widths[name] < before[name]:
            widths = search.grown(widths, name, [block for block in sensitive if name in carriers.get(block, ())])
    return {name: channels for name, channels in widths.items() if channels < before[name]}


@dataclass(frozen=True)
class _Search:
    """The search of ``widest_widths``: ``steps`` are each group's widths, ascending, ``least`` the smallest memory."""

    before: Widths
    steps: Mapping[str, Sequence[int]]
    temporary: Callable[[Widths], Sequence[int]]
    target: int
    least: Sequence[int]

    def shrunk_to_target(self, widths: dict[str, int], block: int, names: Sequence[str]) -> dict[str, int]:
        """Widths with one more block at the target: one ratio for those of its groups that are not narrower yet."""
        fractions = sorted({step / self.before[name] for name in names for step in self.steps[name]}) or [1.0]

        def excess(index: int) -> int:
            narrow = self._shrunk(widths, names, fractions[index])
            return self._excess(narrow, [block]) if index else self.least[block] - self.target

        if excess(0) > 0:
            raise ModelError(
                f"block {block} needs at least {self.least[block]} bytes with any pruning, "
                f"more than the target of {self.target}."
            )
        return self._shrunk(widths, names, fractions[_last(excess, 0, len(fractions) - 1)])

    def grown(self, widths: dict[str, int], name: str, blocks: Sequence[int]) -> dict[str, int]:
        """Widths with one group as wide as the target of these blocks allows."""
        steps = self.steps[name]
        own = steps.index(widths[name])

        def excess(index: int) -> int:
            return self._excess(widths | {name: steps[index]}, blocks)

        return widths | {name: steps[own if excess(own + 1) > 0 else _last(excess, own + 1, len(steps) - 1)]}

    def _excess(self, widths: Widths, blocks: Sequence[int]) -> int:
        needed = self.temporary(widths)
        return max(needed[block] for block in blocks) - self.target

    def _shrunk(self, widths: dict[str, int], names: Sequence[str], fraction: float) -> dict[str, int]:
        found = {}
        for name in names:
            fitting = [step for step in self.steps[name] if step <= fraction * self.before[name]]
            found[name] = min(widths[name], fitting[-1] if fitting else self.steps[name][0])
        return widths | found


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
