"""Parsing of bytes and seconds from text. MB is 10^6 bytes and MiB is 2^20."""

from __future__ import annotations

import math
import re

from snugfit.errors import UsageError, shown

_BYTE_UNITS = {"b": 1}
_BYTE_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_BYTE_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
_SECOND_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$", re.IGNORECASE)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|[smhd])\s*", re.IGNORECASE)


def parse_bytes(text: str | float) -> int:
    """Turn ``"512MiB"``, ``"1.5 GB"`` or a number of bytes (``100e6``) into bytes.

    >>> parse_bytes("512MiB"), parse_bytes("1.5 GB")
    (536870912, 1500000000)

    Raises:
        UsageError: the text is not a size, has no known unit, or is not positive.
    """
    if isinstance(text, str):
        match = _BYTES.match(text)
        unit = match.group(2).lower() if match else "?"
        if match and not unit and float(match.group(1)):
            raise UsageError(f"the size '{text}' has no unit; did you mean {match.group(1)}MB or {match.group(1)}MiB?")
        if match is None or unit not in {"", *_BYTE_UNITS}:
            raise UsageError(f"'{text}' is not a size; write it like 100MB (10^6 bytes) or 512MiB (2^20).")
        value = float(match.group(1)) * _BYTE_UNITS.get(unit, 1)
    elif isinstance(text, bool) or not isinstance(text, (int, float)):
        raise UsageError(f"a size is text like '100MB', or a number of bytes, not {shown(text)}.")
    else:
        value = text
    if not 0 < value < 2**63 or not round(value):
        raise UsageError(f"a size must be positive, and below 8 EiB, not {shown(text)}.")
    return round(value)


def parse_seconds(text: str | float) -> float:
    """Turn ``"2h"``, ``"1h30m"``, ``"90s"`` or a plain number of seconds into seconds.

    >>> parse_seconds("1h30m")
    5400.0

    Raises:
        UsageError: the text is not a duration or is not positive.
    """
    if isinstance(text, (int, float)):
        value = float(text)
    else:
        stripped = text.strip()
        rest = _DURATION_PART.sub("", stripped)
        if not stripped or rest:
            raise UsageError(f"'{text}' is not a duration; write it like 90s, 15m or 1h30m.")
        value = sum(float(n) * _SECOND_UNITS[u.lower()] for n, u in _DURATION_PART.findall(stripped))
    if not 0 < value < math.inf:
        raise UsageError(f"a duration must be positive, not {text}.")
    return value


MOST_CHANNELS, MOST_PIXELS = 1024, 2**16
"""Largest image."""


def parse_shape(text: str) -> tuple[int, int, int]:
    """Turn ``"3x224x224"`` into channels, height and width.

    >>> parse_shape("3x224x224")
    (3, 224, 224)

    Raises:
        ValueError: the text has another form, or a number is 0 or too large.
    """
    channels, height, width = (int(part) for part in text.lower().split("x"))
    if not (1 <= channels <= MOST_CHANNELS and 1 <= height <= MOST_PIXELS and 1 <= width <= MOST_PIXELS):
        raise ValueError(text)
    return channels, height, width


Sides = int | tuple[int, int]
"""Size of images: the side of squares, or height and width."""


def parse_sides(text: str) -> Sides:
    """Turn ``"96"`` into the side of squares, and ``"96x160"`` into height and width.

    >>> parse_sides("96"), parse_sides("96x160"), parse_sides("96x96")
    (96, (96, 160), 96)

    Raises:
        ValueError: the text has another form, or a number is 0 or too large.
    """
    sides = [int(part) for part in text.lower().split("x")]
    height, width = sides if len(sides) > 1 else sides * 2
    if not (1 <= height <= MOST_PIXELS and 1 <= width <= MOST_PIXELS):
        raise ValueError(text)
    return height if height == width else (height, width)


def height_and_width(sides: Sides) -> tuple[int, int]:
    """Height and width of images of this size."""
    return (sides, sides) if isinstance(sides, int) else sides


def sides_text(sides: Sides) -> str:
    """The size of images as ``--image-size`` takes it."""
    return str(sides) if isinstance(sides, int) else "x".join(map(str, sides))


def parse_batches(text: str) -> tuple[int, ...]:
    """Turn ``"32,64"`` into numbers of images; raises ValueError if a part is no number from 1 to a million."""
    sizes = tuple(int(part) for part in text.split(","))
    if not all(1 <= size <= 10**6 for size in sizes):
        raise ValueError(text)
    return sizes
