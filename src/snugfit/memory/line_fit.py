"""Predict memory: least-squares lines over batch size, raised so that no measured point lies above them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from snugfit._core.profile import ProbeLine, ProbePoint


def fit_line(name: str, points: Sequence[ProbePoint], smallest_batch: int = 1) -> ProbeLine:
    """Fit bytes and seconds of a probe over batch size (NeuroFlux section 5.2).

    Args:
        name: name of the probe.
        points: measurements at one or more batch sizes; with a single one, bytes are taken as proportional to it.
    """
    if not points:
        raise ValueError(f"probe {name} has no measured point")
    batches = [float(point.batch) for point in points]
    sizes = [float(point.peak_bytes) for point in points]
    seconds = [point.seconds for point in points]
    sample_bytes, fixed_bytes = _least_squares(batches, sizes)
    sample_seconds, fixed_seconds = _least_squares(batches, seconds)
    sample_mapping, fixed_mapping = _least_squares(batches, [point.mapping_seconds for point in points])
    gaps = [size - fixed_bytes - sample_bytes * batch for batch, size in zip(batches, sizes, strict=True)]
    residual = max(0.0, *gaps)
    ordered = tuple(sorted(points, key=lambda point: point.batch))
    line = ProbeLine(name, fixed_bytes, sample_bytes, residual, fixed_seconds, sample_seconds, ordered, smallest_batch)
    return replace(line, fixed_mapping=fixed_mapping, sample_mapping=sample_mapping)


def _least_squares(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope (never negative) and intercept.

    Written out, because numpy's solver calls a BLAS that reserves 32 MB per thread, and ends the process when that
    is refused under a memory limit.
    """
    mean_x, mean_y = float(np.mean(x)), float(np.mean(y))
    spread = sum((value - mean_x) ** 2 for value in x)
    if spread == 0:
        return max(y) / x[0], 0.0
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    if slope < 0:
        return 0.0, max(y)
    return slope, mean_y - slope * mean_x
