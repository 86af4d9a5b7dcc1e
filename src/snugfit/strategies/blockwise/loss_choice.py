"""Which local losses an open choice considers, in which order, and why not another. Arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from snugfit._core.budget import Aim
from snugfit._core.profile import Profile

Measured = TypeVar("Measured")
AUTO = "auto"
_WITH = " with "
LOOK_AHEAD = "auglocal"
"""The local loss whose depth the budget decides, if none is named."""
DEPTHS = (4, 3, 2, 1)
"""Depths of ``auglocal`` to consider; with more layers accuracy is higher (AugLocal, section 4)."""
DEFAULT_DEPTH = f"{LOOK_AHEAD}:depth=2"
EXPECTED_ACCURACY = (DEFAULT_DEPTH, "aan", "lls-mxm")
"""The local losses that ``auto`` considers, by the accuracy to expect, best first.

ResNet-20 on CIFAR-10 (6,000 images, 12 epochs, one seed, standard error 1 point) reached 66.3 % with ``auglocal`` and
65.2 with ``aan`` in two modules, 65.7 and 61.7 in four. ``lls-mxm`` has no layer besides a projection.
"""
MOST_WORK = 2.0
"""With the aim of time, a local loss is considered if training takes at most this factor of the cheapest one's work."""
MODULE_BATCH = 16
"""Batch size that makes larger modules and local losses worth their memory; smaller ones estimate BatchNorm's
statistics badly."""

LossCost = tuple[str, tuple[int, ...], int]
"""A local loss, the tensor bytes of each module's step, and multiply-accumulates per image in training."""


@dataclass(frozen=True)
class LossChoice:
    """The local losses to choose from, and what the choice is for.

    Attributes:
        costs: of each local loss.
        aim: time refuses costly losses, accuracy accepts them, memory takes the leanest.
        exits: whether a small exit is asked for; an exit contains its local loss, and that of ``auglocal`` is large.
    """

    costs: Sequence[LossCost]
    aim: Aim
    exits: bool

    def order(self) -> list[str]:
        """The local losses to measure, until one fits: best first, each leaner than those before it."""
        if self.aim == "memory":
            return [min(self.costs, key=lambda cost: max(cost[1]))[0]]
        found: list[LossCost] = []
        for cost in self.costs:
            if not self._refusal(cost) and all(max(cost[1]) < max(other[1]) for other in found):
                found.append(cost)
        return [name for name, *_ in found]

    def _refusal(self, cost: LossCost) -> str:
        """Why a local loss is not considered in any budget; empty if it is."""
        name, _, work = cost
        if self.exits and name == self.costs[0][0] == DEFAULT_DEPTH:  # not among depths of one that was named
            return "makes exits large"
        ratio = work / min(other[2] for other in self.costs)
        if self.aim == "time" and ratio > MOST_WORK:
            return (
                f"takes {ratio:.1f} times the arithmetic of the cheapest, where --aim time accepts {MOST_WORK:g} times"
            )
        return ""

    def reason(self, chosen: str, unfit: str) -> str:
        """A sentence: why this local loss is chosen; ``unfit`` says what a better one lacks that did not fit."""
        if self.aim == "memory":
            return f"Its local loss is {chosen}, which needs the least memory."
        names = [name for name, *_ in self.costs]
        better = self.costs[: names.index(chosen)]
        if not better:
            return f"Its local loss is {chosen}, of which the most accuracy is expected."
        reasons = ", and ".join(f"{cost[0]} {self._refusal(cost) or unfit}" for cost in better)
        return f"Its local loss is {chosen}. More accuracy is expected of others, but {reasons}."


def local_losses(named: str) -> tuple[str, ...]:
    """The local losses to choose from, by the accuracy to expect, best first; one if its name leaves nothing open."""
    open_choices = {AUTO: EXPECTED_ACCURACY, LOOK_AHEAD: tuple(f"{LOOK_AHEAD}:depth={depth}" for depth in DEPTHS)}
    return open_choices.get(named, (named,))


def settled(named: str) -> str:
    """The local loss that is measured where nothing is chosen."""
    return {AUTO: "aan", LOOK_AHEAD: DEFAULT_DEPTH}.get(named, named)


def probe_suffix(loss: str) -> str:
    """The end of the names of probes of a local loss that is considered among others."""
    return f"{_WITH}{loss}"


def profile_of(profile: Profile, loss: str) -> Profile:
    """A profile with the probes of one of the local losses under the names that they have without a choice."""

    def own(by_name: Mapping[str, Measured]) -> dict[str, Measured]:
        parts = {name: name.partition(_WITH) for name in by_name}
        return {parts[name][0]: each for name, each in by_name.items() if parts[name][2] in ("", loss)}

    return replace(profile, lines=own(profile.lines), floors=own(profile.floors), kept=own(profile.kept))
