"""What a network reads if it takes several inputs, and the shape in which they travel as one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

InputDtype = Literal["float32", "uint8", "int8", "int16", "int32", "int64", "bool"]
_MOST_VALUES = 2**31


@dataclass(frozen=True)
class Input:
    """One of several inputs of a network.

    Attributes:
        shape: of one item's, without the batch axis; empty for a number.
        dtype: what the network gets.
        name: keyword of the forward pass; empty if it is passed by position.
    """

    shape: tuple[int, ...]
    dtype: InputDtype = "float32"
    name: str = ""

    def __post_init__(self) -> None:
        if min(self.shape, default=1) < 1 or self.values > _MOST_VALUES:
            raise ValueError(f"'shape' of an input must have from 1 to {_MOST_VALUES:,} values, not {self.shape}")

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "a number"
        return f"{self.name} {shape} of {self.dtype}".strip()

    @property
    def values(self) -> int:
        """Numbers in one item's."""
        return math.prod(self.shape)


def packed_shape(inputs: Sequence[Input]) -> tuple[int, int, int]:
    """Shape (1, 1, N) of the values of all inputs of an item, one after another, as an image.

    >>> packed_shape((Input((3, 8, 8)), Input((), "int64")))
    (1, 1, 193)
    """
    return 1, 1, sum(each.values for each in inputs)
