"""What a network reads if it takes several inputs, and the shape in which they travel as one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from snugfit._core.amounts import parse_shape

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


def shape_of(text: str) -> tuple[int, int, int]:
    """Channels, height and width of an image, or (1, 1, N) of the values of several inputs, by what describes them.

    >>> shape_of("3x8x8"), shape_of("3x8x8,int64")
    ((3, 8, 8), (1, 1, 193))

    Raises:
        ValueError: as for :func:`parse_inputs`.
    """
    inputs = parse_inputs(text)
    return packed_shape(inputs) if inputs else parse_shape(text)


def described(inputs: Sequence[Input]) -> str:
    """Several inputs in words.

    >>> described((Input((3, 8, 8)), Input((), "int64", "age")))
    '3x8x8 of float32 and age a number of int64'
    """
    return f"{', '.join(map(str, inputs[:-1]))} and {inputs[-1]}"


def parse_inputs(text: str) -> tuple[Input, ...]:
    """Turn ``"image=3x224x224,ids=16xint64,age=float32"`` into several inputs, with or without names.

    A type alone is that of a number, and float32 need not be said, but for numbers alone: ``"3,224,224"`` is probably
    one shape, with commas for x. The shape of one image, ``"3x224x224"``, is none.

    >>> parse_inputs("image=3x8x8,ids=16xint64")[1]
    Input(shape=(16,), dtype='int64', name='ids')

    Raises:
        ValueError: the text has another form, a number in it is 0 or too large, or only some have names of their own.
    """
    parts = text.split(",")
    if len(parts) == 1:
        parse_shape(text)
        return ()
    if all(part.strip().isdigit() for part in parts):
        raise ValueError(text)
    inputs = tuple(map(_parse_input, parts))
    names = {each.name for each in inputs}
    if names != {""} and ("" in names or len(names) < len(inputs)):
        raise ValueError(text)
    return inputs


def _parse_input(text: str) -> Input:
    name, named, rest = text.strip().rpartition("=")
    if named and not name.isidentifier():
        raise ValueError(text)
    *sizes, last = rest.lower().split("x")
    dtype = last if last in get_args(InputDtype) else "float32"
    if dtype != last:
        sizes.append(last)
    return Input(tuple(map(int, sizes)), cast(InputDtype, dtype), name)


def inputs_text(inputs: Sequence[Input]) -> str:
    """Inputs as :func:`parse_inputs` reads them.

    >>> inputs_text((Input((3, 8, 8)), Input((), "int64", "age")))
    '3x8x8xfloat32,age=int64'
    """
    return ",".join(
        f"{each.name}={text}" if each.name else text
        for each in inputs
        for text in ["x".join(map(str, (*each.shape, each.dtype)))]
    )
