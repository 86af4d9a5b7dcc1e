"""Pruned widths that fit activation memory: a target per block, or a bound on the whole network at least loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from snugfit.errors import UsageError
from snugfit.surgery.channels import width
from snugfit.surgery.hidden import blocks_of, hidden_groups
from snugfit.surgery.meta_copy import narrowed_meta_copy
from snugfit.surgery.optimum import Choices, choose_widths
from snugfit.surgery.widths import widest_widths

if TYPE_CHECKING:
    from snugfit.memory.activation import ActivationMemory

Profiler = Callable[[fx.GraphModule], "ActivationMemory"]
"""Activation memory of a network on the meta device, with ``find_blocks``' blocks: ``profiling.activation_memory``."""


def widths_for(
    module: fx.GraphModule,
    input_shape: tuple[int, ...],
    profile: Profiler,
    target: int,
    *,
    multiple: int = 1,
    blocks: Collection[int] | None = None,
) -> dict[str, int]:
    """The smallest pruning ratios that bring every block's temporary memory to a target (Yoosefi et al., section V).

    Args:
        module: a traced network with torch's own layers, possibly on meta; it is not changed.
        input_shape: channels, height, width of one image.
        profile: returns the temporary memory of each block, equation (5), in the units of ``target``.
        target: bytes; the paper takes the overall cumulative gradient memory before pruning.
        multiple: widths are rounded down to a multiple of this.
        blocks: those that must reach the target; all if None.

    Returns:
        The width of each group of ``hidden_groups`` that loses channels, by the group's name.

    Raises:
        ModelError: a block cannot reach the target; the message contains the smallest value.
    """
    pruning = _Pruning(module, input_shape, profile)

    def temporary(widths: Mapping[str, int]) -> list[int]:
        return [block.temporary_bytes for block in pruning.profile(widths).blocks]

    return widest_widths(pruning.before, pruning.groups_by_block(), temporary, target, multiple, blocks)


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
    answer is the best (``optimum.choose``).

    Args:
        module, input_shape: as for :func:`widths_for`.
        profile: returns peak and cumulative memory of each block, equations (2) and (6).
        bound: bytes that the peak, equation (1), may come to.
        loss: what a group's width costs in accuracy, by the group's name; nothing for the full one.
        steps: number of choices per block.

    Raises:
        ModelError: nothing fits; it says the smallest peak that there is.
    """
    if steps < 1:
        raise UsageError(f"a block needs one choice of width at least, not {steps}.")
    pruning = _Pruning(module, input_shape, profile)
    found = choose_widths(pruning.choices(loss, steps), bound)
    widths = {name: w for block, at in enumerate(found.choices) for name, w in pruning.widths(block, at, steps).items()}
    return {name: channels for name, channels in widths.items() if channels < pruning.before[name]}


class _Pruning:
    """A network's hidden channels and what its memory comes to with other widths."""

    def __init__(self, module: fx.GraphModule, input_shape: tuple[int, ...], profile: Profiler) -> None:
        self.module, self._profile = module, profile
        self.groups = [group for found in hidden_groups(module, input_shape).values() for group in found]
        self.spans = blocks_of(module, input_shape, self.groups)
        self.before = {group.name: width(module, group) for group in self.groups}
        self._known: dict[tuple[tuple[str, int], ...], ActivationMemory] = {}

    def profile(self, widths: Mapping[str, int]) -> ActivationMemory:
        key = tuple(sorted((name, channels) for name, channels in widths.items() if channels < self.before[name]))
        if key not in self._known:
            self._known[key] = self._profile(narrowed_meta_copy(self.module, self.groups, dict(key)))
        return self._known[key]

    def groups_by_block(self) -> dict[int, list[str]]:
        """Names of the groups whose channels lie in each block."""
        found: dict[int, list[str]] = {}
        for name, (first, last) in self.spans.items():
            for block in range(first, last + 1):
                found.setdefault(block, []).append(name)
        return found

    def widths(self, block: int, choice: int, steps: int) -> dict[str, int]:
        """Widths of the groups that a block makes, for one of ``steps`` choices, the narrowest first."""
        names = [name for name, (first, _) in self.spans.items() if first == block]
        return {name: max(1, self.before[name] * (choice + 1) // steps) for name in names}

    def choices(self, loss: Callable[[str, int], float], steps: int) -> list[Choices]:
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
            found.append(Choices(np.array(losses, np.float64), costs[..., 0], costs[..., 1]))
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
