"""Grouping profiles: which layers tiles run without an exchange, as data that can be printed and parsed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from snugfit.errors import UsageError

_GROUP = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class Profile:
    """Consecutive groups of layers; halos are exchanged at the first feature map of each, backward at the last.

    Attributes:
        cuts: numbers of the feature maps between groups, including the first and the last feature map.
    """

    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.cuts) < 2 or any(a >= b for a, b in pairwise(self.cuts)):
            raise UsageError(f"the cuts of a grouping profile must rise, and be two at least, not {self.cuts}.")

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """First and last feature map of every group."""
        return tuple(pairwise(self.cuts))

    def __str__(self) -> str:
        """As ``0-4 | 4-11 | 11-16``."""
        return " | ".join(f"{start}-{stop}" for start, stop in self.groups)

    @classmethod
    def parse(cls, text: str, cuts: Sequence[int]) -> Profile:
        """Parse a printed profile.

        Args:
            text: such as ``0-4 | 4-11 | 11-16``.
            cuts: where groups may begin and end, in order.

        Raises:
            UsageError: it is not a profile, does not span all layers, or has a cut that is not allowed.
        """
        found = [_GROUP.fullmatch(part.strip()) for part in text.split("|")]
        groups = [(int(each[1]), int(each[2])) for each in found if each]
        joined = all(before[1] == after[0] for before, after in pairwise(groups))
        if len(groups) < len(found) or not joined:
            raise UsageError(f"'{text}' is no grouping profile; write groups of layers like 0-4 | 4-11 | 11-16.")
        profile = cls((groups[0][0], *(stop for _, stop in groups)))
        strange = sorted({*profile.cuts} - {*cuts})
        if strange or (profile.cuts[0], profile.cuts[-1]) != (cuts[0], cuts[-1]):
            raise UsageError(
                f"the grouping profile {profile} must go from {cuts[0]} to {cuts[-1]}, and groups may meet at "
                f"{', '.join(map(str, cuts))} only."
            )
        return profile


def one_group(cuts: Sequence[int]) -> Profile:
    """All layers in one group: one exchange of halos."""
    return Profile((cuts[0], cuts[-1]))


def every_cut(cuts: Sequence[int]) -> Profile:
    """A group per layer: nothing is computed twice."""
    return Profile(tuple(cuts))


def named_profile(text: str, cuts: Sequence[int]) -> Profile:
    """Parse ``one``, ``every`` or a printed profile.

    Raises:
        UsageError: see :meth:`Profile.parse`.
    """
    named = {"one": one_group, "every": every_cut}
    return named[text](cuts) if text in named else Profile.parse(text, cuts)
