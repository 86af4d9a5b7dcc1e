"""What commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from snugfit._core.record import SCHEMA

__all__ = ["SCHEMA", "note", "print_json"]


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout; NaN and infinities become null."""
    print(json.dumps(_finite(data), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def note(message: str) -> None:
    """Print a line for people, on stderr."""
    print(message, file=sys.stderr)
