"""Bytes and seconds as text, printed here and nowhere else; :mod:`snugfit._core.amounts` reads them."""

from __future__ import annotations

MB = 10**6
"""Bytes of a megabyte, as everywhere here; a MiB has 2^20."""


def format_bytes(count: float) -> str:
    """Print bytes in decimal units: ``format_bytes(97_300_000) == "97.3 MB"``."""
    if abs(count) < 1000:
        return f"{int(count)} B"
    for unit, size in (("kB", 10**3), ("MB", 10**6)):
        if round(abs(count / size), 1) < 1000:
            return f"{count / size:.1f} {unit}"
    return f"{count / 10**9:.1f} GB"


def format_seconds(seconds: float) -> str:
    """Print seconds as people say them: ``format_seconds(5400) == "1h30m"``."""
    if round(seconds * 1e3) < 1000:
        return f"{seconds * 1e3:.0f}ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    if round(seconds) < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h{minutes:02d}m"


def format_short_seconds(seconds: float) -> str:
    """Print seconds with three digits, down to microseconds: ``format_short_seconds(0.00123) == "1.23ms"``."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f}us"
    return f"{1e3 * seconds:.3g}ms" if seconds < 1 else format_seconds(seconds)
