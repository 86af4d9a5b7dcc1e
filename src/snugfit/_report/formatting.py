"""Numbers and names as text of the report and the console."""

from __future__ import annotations

from snugfit._core.record import PRECISIONS, Record
from snugfit._quantities import format_bytes, format_seconds

NONE = "\N{EN DASH}"
"""Shown for a value that was not measured or does not apply."""


def count(value: float) -> str:
    """Print a count with a suffix: ``count(14_728_266) == "14.7M"``."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def percent(share: float | None, digits: int = 1) -> str:
    """Print a share: ``percent(0.912) == "91.2 %"``; a dash for None."""
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def share(value: float | None) -> str:
    """Print a share of one, such as rho: ``share(0.4931) == "0.49"``; a dash for None."""
    return NONE if value is None else f"{value:.2f}"


def metric_values(record: Record) -> list[tuple[str, list[tuple[str, str]]]]:
    """Metrics from Python by name, each with its split and its value as text."""
    names = {"val": "validation"}
    return [
        (name, [(names.get(split, split), NONE if value is None else f"{value:.4g}") for split, value in each.items()])
        for name, each in record.metrics.items()
    ]


def metric_of(record: Record) -> str:
    """Name of a run's metric: ``accuracy``, ``mAP`` or ``mAP50``."""
    return next((name for key, name in PRECISIONS.items() if key in record.accuracy), "accuracy")


def kept_epoch(record: Record) -> str:
    """The epoch, from 1, whose weights a run has kept; empty where each block has its own."""
    if record.kept is None:
        return ""
    epoch, epochs = record.kept.epoch + 1, record.workload.get("epochs", "?")
    best = record.kept.val_accuracy is not None and record.workload.get("keep") == "best"
    return f"epoch {epoch} of {epochs}, {'best on validation images' if best else 'the last'}"


def predicted_peak(record: Record) -> str:
    """The predicted peak of a run, from what it needs to what freed memory that the heap keeps may add; or a dash."""
    most = record.predicted.get("peak_bytes")
    if most is None:
        return NONE
    kept = any(phase.predicted_kept_bytes for phase in record.phases)
    least = max(phase.predicted_peak_bytes - phase.predicted_kept_bytes for phase in record.phases) if kept else most
    return peak_range(int(most), int(most) - int(least))


def peak_range(peak_bytes: int, kept_bytes: int) -> str:
    """A predicted peak without and with kept memory: ``peak_range(90_000_000, 30_000_000) == "60.0 to 90.0 MB"``."""
    least, most = format_bytes(peak_bytes - kept_bytes), format_bytes(peak_bytes)
    number, _, unit = least.partition(" ")
    return most if kept_bytes <= 0 or least == most else f"{number if most.endswith(f' {unit}') else least} to {most}"


def shorten(name: str, most: int) -> str:
    """Leave out the middle of a long name."""
    if len(name) <= most:
        return name
    head = (most - 1) // 2
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"


def phase_label(name: str) -> str:
    """Name of a phase for an axis: the block without its units."""
    words = name.partition(":")[0].split()
    return " ".join(words[:2]) if words and words[0] == "block" else shorten(name, 22)


def size(count: float | None) -> str:
    """Print bytes; a dash for None."""
    return NONE if count is None else format_bytes(count)


def duration(seconds: float | None) -> str:
    """Print seconds; a dash for None."""
    return NONE if seconds is None else format_seconds(seconds)
