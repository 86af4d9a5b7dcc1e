"""Pruned widths that bring every block's temporary memory to a target (Yoosefi et al., sections III and V)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from snugfit.errors import ModelError
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
