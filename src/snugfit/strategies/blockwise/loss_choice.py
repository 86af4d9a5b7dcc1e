"""Which local losses ``--local-loss auto`` considers, in which order, and why not another. Arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from snugfit._core.budget import Aim
from snugfit._core.profile import Profile

Measured = TypeVar("Measured")
AUTO = "auto"
EXPECTED_ACCURACY = ("auglocal", "aan", "lls-mxm")
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
        if self.exits and name == EXPECTED_ACCURACY[0]:
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


def probe_suffix(loss: str) -> str:
    """The end of the names of probes of a local loss that ``auto`` considers."""
    return f" with {loss}"


def profile_of(profile: Profile, loss: str) -> Profile:
    """A profile with the probes of one of the local losses under the names that they have without ``auto``."""
    others = tuple(probe_suffix(each) for each in EXPECTED_ACCURACY if each != loss)

    def own(by_name: Mapping[str, Measured]) -> dict[str, Measured]:
        named = {name: each for name, each in by_name.items() if not name.endswith(others)}
        return {name.removesuffix(probe_suffix(loss)): each for name, each in named.items()}

    return replace(profile, lines=own(profile.lines), floors=own(profile.floors), kept=own(profile.kept))
