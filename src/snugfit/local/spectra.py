"""Spectra of a local loss's basis and of the activations that it trains (LLS section 4.1, Figure 2). Pure functions.

Shapes: N samples, K classes, T length of a unit's latents, F = T // 2 + 1 frequencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from snugfit.errors import DataError


def spectrum(signals: Tensor) -> Tensor:
    """Magnitude of the discrete Fourier transform over the last axis: (..., T) to (..., F)."""
    magnitude: Tensor = torch.fft.rfft(signals).abs()
    return magnitude


def spatial_frequencies(length: int) -> Tensor:
    """Frequency of every value of a spectrum in cycles per latent, from 0 to 1/2, (F,)."""
    cycles: Tensor = torch.fft.rfftfreq(length)
    return cycles


def class_means(batches: Iterable[tuple[Tensor, Tensor]], classes: Sequence[int]) -> Tensor:
    """Mean latents of each class, (K, T), in the order of ``classes``.

    Args:
        batches: latents (N, T) and labels (N,).
        classes: labels to average; samples of others are left out.

    Raises:
        DataError: there is no sample of a class.
    """
    sums: list[Tensor | float] = [0.0] * len(classes)
    counts = [0] * len(classes)
    for latents, labels in batches:
        for row, label in enumerate(classes):
            chosen = latents[labels == label]
            sums[row] = sums[row] + chosen.sum(0)
            counts[row] += len(chosen)
    if 0 in counts:
        raise DataError(f"there is no image of class {classes[counts.index(0)]} to average.")
    return torch.stack([torch.as_tensor(total) / count for total, count in zip(sums, counts, strict=True)])


def prominence(latents: Tensor, basis: Tensor) -> Tensor:
    """How closely activations follow a basis: their magnitude where the basis is strongest, over their median, (K,).

    1 is a frequency like any other. The constant component, frequency 0, is left out.

    Args:
        latents, basis: spectra (K, F), F at least 2.
    """
    rest, strongest = latents[:, 1:], basis[:, 1:].argmax(1, keepdim=True)
    return rest.gather(1, strongest)[:, 0] / rest.median(1).values.clamp(min=torch.finfo(rest.dtype).tiny)
