"""Checks of boxes: errors, and repairs that are counted."""

from __future__ import annotations

import math
from collections import Counter

from snugfit.errors import DataError

Row = tuple[float, float, float, float, float]
MOST_BOXES = 10_000
"""Largest number of boxes of one image; every image is padded to the number of the image with most boxes."""
_ROUNDING = 1e-3
"""Largest distance of an edge beyond the image that counts as rounding."""


class BoxChecks:
    """Checks boxes one by one, and counts repairs, for which ultralytics prints a warning."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, what: str) -> None:
        """Count something that the user should know; ``what`` is the text after the number."""
        self._counts[what] += 1

    @property
    def notes(self) -> tuple[str, ...]:
        """One line per kind of repair."""
        return tuple(f"{count:,} {what}" for what, count in self._counts.items())

    def rows(self, found: list[Row], place: str) -> list[Row]:
        """The valid boxes of an image, without duplicates, cut off at the image's edges.

        Args:
            found: class, centre x, centre y, width, height as fractions of the image's sides.
            place: file or image, for messages.

        Raises:
            DataError: a box lies outside the image, or there are over 10,000.
        """
        repaired = [row for each in found if (row := self._repaired(each, place)) is not None]
        kept = list(dict.fromkeys(repaired))
        if len(kept) > MOST_BOXES:
            raise DataError(f"{place}: {len(kept):,} boxes are more than {MOST_BOXES:,} in one image. Remove some.")
        for _ in range(len(repaired) - len(kept)):
            self.count("boxes are listed twice for their image and count once")
        return kept

    def _repaired(self, row: Row, place: str) -> Row | None:
        label, x, y, width, height = row
        if not all(map(math.isfinite, row)) or not (0 <= x <= 1 and 0 <= y <= 1) or max(width, height) > 2:
            raise DataError(
                f"{place}: the box {x:g} {y:g} {width:g} {height:g} lies outside the image. Give centre and size as "
                "fractions of the image's width and height, between 0 and 1."
            )
        if width <= 0 or height <= 0:
            self.count("boxes without width or height were left out")
            return None
        left, right = max(x - width / 2, 0.0), min(x + width / 2, 1.0)
        top, bottom = max(y - height / 2, 0.0), min(y + height / 2, 1.0)
        if max(width - (right - left), height - (bottom - top)) <= _ROUNDING:
            return row
        self.count("boxes reach beyond their image and were cut off at its edge")
        return (label, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
