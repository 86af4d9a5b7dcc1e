"""Recomputation schedules: which units save tensors, and which stretches or modules run again. Plain data, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, groupby, takewhile
from typing import ClassVar

from snugfit.errors import UsageError

MODULES = "modules"
"""How the text of a :class:`ModuleSchedule` begins."""
NAME = r"[A-Za-z0-9_.]+"
"""Names of modules that can be printed and parsed."""
_TOKEN = re.compile(r"\s*(?:(?P<first>\d+)(?:-(?P<last>\d+))?|(?P<open>\()|(?P<close>\)))")


@dataclass(frozen=True)
class Schedule:
    """How consecutive units run in one step.

    A schedule prints as text and parses back. In ``((0-1) 2-3) 4-6``, units 4 to 6 save tensors for the backward pass.
    For units 0 to 3 only the input of unit 0 is kept. When the backward pass reaches them, they run again by the
    schedule in parentheses: 2 and 3 now save tensors, and 0 and 1 run once more after the backward pass of 2 and 3.
    In ``[0-1 (2-3)] 4-6``, what units 0 and 1 save and the input of unit 2 are on disk until the backward pass.

    Attributes:
        parts: in chain order, either the number of a unit that saves what its backward pass needs, or the schedule by
            which a stretch runs again from its kept input.
        paged: how many of the first parts keep on disk what they keep.
    """

    parts: tuple[int | Schedule, ...]
    paged: int = 0

    @classmethod
    def keeping(cls, count: int) -> Schedule:
        """The schedule of ``count`` units without recomputation: plain backpropagation."""
        return cls(tuple(range(count)))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the text of a schedule.

        Raises:
            UsageError: the text is not a schedule of units 0, 1, 2, ... in order.
        """
        levels: list[list[int | Schedule]] = [[]]
        if text.startswith("[") and "]" in text:
            first, _, last = text[1:].partition("]")
            return replace(cls.parse(f"{first} {last}"), paged=len(cls.parse(first).parts))
        rest = text.rstrip()
        while found := _TOKEN.match(rest):
            rest = rest[found.end() :]
            if found["open"]:
                levels.append([])
            elif found["close"] and len(levels) > 1 and levels[-1]:
                stretch = cls(tuple(levels.pop()))
                levels[-1].append(stretch)
            elif found["first"]:
                levels[-1].extend(range(int(found["first"]), int(found["last"] or found["first"]) + 1))
            else:
                break
        schedule = cls(tuple(levels[0]))
        if rest or len(levels) > 1 or not levels[0] or list(schedule.units) != list(range(len(list(schedule.units)))):
            raise UsageError(f"'{text}' is no schedule; one looks like ((0-1) 2-3) 4-6.")
        return schedule

    @property
    def units(self) -> Iterator[int]:
        """The numbers of its units, in order."""
        for part in self.parts:
            yield from part.units if isinstance(part, Schedule) else (part,)

    @property
    def recomputes(self) -> bool:
        """Whether any unit runs more than once."""
        return any(isinstance(part, Schedule) for part in self.parts)

    def __str__(self) -> str:
        if self.paged:
            return f"[{Schedule(self.parts[: self.paged])}] {Schedule(self.parts[self.paged :])}".rstrip()
        words: list[str] = []
        for nested, parts in groupby(self.parts, lambda part: isinstance(part, Schedule)):
            group = list(parts)
            if nested:
                words += [f"({part})" for part in group]
            else:
                words.append(f"{group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}")
        return " ".join(words)


@dataclass(frozen=True)
class ModuleSchedule:
    """Which modules of a network that has no units run again in the backward pass, at each of their calls.

    It prints as text and parses back, such as ``modules (encoder.0-3 decoder)``.

    Attributes:
        names: of the modules, of characters of ``NAME``.
    """

    names: tuple[str, ...]
    paged: ClassVar[int] = 0

    @classmethod
    def parse(cls, text: str) -> ModuleSchedule:
        """Parse the text of a schedule.

        Raises:
            UsageError: the text is none.
        """
        if not re.fullmatch(rf"{MODULES} \({NAME}(-\d+)?( {NAME}(-\d+)?)*\)", text):
            raise UsageError(f"'{text}' is no schedule; one looks like {MODULES} (encoder.0-3 decoder).")
        names: list[str] = []
        for word in text[len(MODULES) + 2 : -1].split():
            first, _, last = word.partition("-")
            owner, _, number = first.rpartition(".")
            numbers = range(int(number), int(last) + 1) if last else ()
            names += [f"{owner}.{each}".lstrip(".") for each in numbers] or [first]
        return cls(tuple(names))

    @property
    def recomputes(self) -> bool:
        """Whether any module runs again."""
        return bool(self.names)

    def __str__(self) -> str:
        words, left = list[str](), list(self.names)
        while left:
            owner, dot, last = left[0].rpartition(".")
            row = [left[0]]
            if last.isdecimal():
                following = (f"{owner}{dot}{number}" for number in count(int(last)))
                row = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, following, strict=False))]
            words.append(f"{row[0]}-{row[-1].rpartition('.')[2]}" if len(row) > 1 else left[0])
            del left[: max(len(row), 1)]
        return f"{MODULES} ({' '.join(words)})"


AnySchedule = Schedule | ModuleSchedule


def parse_schedule(text: str) -> AnySchedule:
    """The schedule of units, or of modules, that a text describes; raises UsageError if it describes none."""
    return ModuleSchedule.parse(text) if text.startswith(MODULES) else Schedule.parse(text)
