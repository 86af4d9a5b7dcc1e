"""Boxes of many images in one table, their checks and repairs, and images with boxes."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from snugfit._data.decode import Decoder
from snugfit._data.files import FileNames
from snugfit._data.folder import FileImages
from snugfit.errors import DataError

Row = tuple[float, float, float, float, float]
MOST_BOXES = 10_000
"""Largest number of boxes of one image; every image is padded to the number of the image with most boxes."""
_ROUNDING = 1e-3
"""Largest distance of an edge beyond the image that counts as rounding."""

CLASS, BOX = 0, slice(1, 5)
NONE = -1.0
"""Class of the rows that pad an image's boxes."""


@dataclass(frozen=True)
class Boxes:
    """Boxes of N images.

    Attributes:
        rows: class, centre x, centre y, width and height as fractions of the image's sides, (T, 5) float32.
        starts: first row of each image, (N + 1,) int64.
    """

    rows: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def counts(self) -> np.ndarray:
        """Boxes of each image, (N,)."""
        return np.diff(self.starts)

    def chosen(self, indices: np.ndarray) -> Boxes:
        """Boxes of some of the images (M,), in their order."""
        counts = self.counts[indices]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        places = np.repeat(self.starts[indices] - starts[:-1], counts) + np.arange(starts[-1])
        return Boxes(self.rows[places], starts)

    def padded(self, indices: np.ndarray, most: int) -> np.ndarray:
        """Boxes of some images (B,) as (B, most, 5) float32; rows of class -1 if an image has fewer."""
        found = np.zeros((len(indices), most, 5), dtype=np.float32)
        found[..., CLASS] = NONE
        for place, index in enumerate(indices):
            rows = self.rows[self.starts[index] : self.starts[index + 1]]
            found[place, : len(rows)] = rows
        return found


class BoxTable:
    """Boxes that are added image by image."""

    def __init__(self) -> None:
        self._values, self._starts = array("f"), array("q", [0])

    def add(self, rows: Iterable[tuple[float, ...]]) -> None:
        """Add an image with these boxes: class, centre x, centre y, width, height."""
        for row in rows:
            self._values.extend(row)
        self._starts.append(len(self._values) // 5)

    def boxes(self) -> Boxes:
        """All boxes."""
        rows = np.array(self._values, dtype=np.float32).reshape(-1, 5)
        return Boxes(rows, np.array(self._starts, dtype=np.int64))


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
        """The valid boxes of an image, without duplicates, cut off at the image's edges."""
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


class BoxedImages(FileImages):
    """Image files with boxes; images are decoded when they are read, resized to the square without cropping.

    Boxes of an image are padded to ``most`` rows, by default the largest number of boxes of an image.
    """

    has_boxes = True

    def __init__(self, files: FileNames, boxes: Boxes, decoder: Decoder, most: int | None = None) -> None:
        labels = np.zeros(len(files), dtype=np.int64)  # an image may hold objects of several classes
        super().__init__(files, labels, decoder)
        self.boxes = boxes
        self.most = max(int(boxes.counts.max(initial=0)), 1) if most is None else most

    def targets(self, indices: np.ndarray) -> np.ndarray:
        """Boxes of images (B,) as (B, most, 5) float32, class -1 in rows that pad."""
        return self.boxes.padded(indices, self.most)

    def chosen(self, indices: np.ndarray) -> BoxedImages:
        """Some of the images (M,), in their order."""
        files = FileNames()
        for index in indices:
            files.append(self.files[int(index)])
        return BoxedImages(files, self.boxes.chosen(indices), self._decoder, self.most)

    def padded_to(self, most: int) -> BoxedImages:
        """The same images with boxes padded to this many rows."""
        return BoxedImages(self.files, self.boxes, self._decoder, most)


BoxedData = tuple[tuple[str, ...], dict[str, BoxedImages], Decoder, BoxChecks]
"""Class names, the parts, the decoder of their images, and the counted repairs."""
