"""Pictures of what a run learned, as data: spectra, classes in two dimensions, heat maps (LLS, Figures 2 to 4).

Shapes: B images of C channels, height H and width W; N images or samples shown; K classes shown or all; D values of a
class's row; T length of a unit's latents, F = T // 2 + 1 frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from snugfit.errors import DataError, ModelError, UnusableInputError, UsageError

FEWEST = 4
"""Fewest rows that t-SNE can place: its perplexity, a third of the others, is 1 then."""
PERPLEXITY = 30.0


@dataclass(frozen=True)
class Spectra:
    """Spectra of the vectors that classes are projected on, and of their mean activations (Figure 2).

    Attributes:
        learned: whether the vectors are combinations that M learned.
        frequencies: (F,), in cycles per latent.
        basis, latents: magnitudes (K, F).
        prominence: activations at the vector's strongest frequency, as multiples of their median magnitude, (K,).
        images: number of images of each class that were averaged.
    """

    unit: str
    learned: bool
    classes: tuple[str, ...]
    frequencies: np.ndarray
    basis: np.ndarray
    latents: np.ndarray
    prominence: tuple[float, ...]
    images: tuple[int, ...]
    split: str


@dataclass(frozen=True)
class Projection:
    """Rows of M in two dimensions (Figure 3).

    Attributes:
        points: (K, 2).
        closest: the two classes with the nearest rows of M.
        groups: super-class of each class; empty if there are none.
        group_agreement: share of classes whose nearest class is of their super-class, and the share expected by chance.
        why_no_groups: why super-classes are unknown, if the data set has some.
    """

    unit: str
    classes: tuple[str, ...]
    points: np.ndarray
    closest: tuple[str, str]
    groups: tuple[str, ...] = ()
    group_agreement: tuple[float, float] = (0.0, 0.0)
    why_no_groups: str = ""


@dataclass(frozen=True)
class HeatMaps:
    """Images, and heat maps of their evidence for the predicted class (Figure 4).

    Images are uint8 (N, C, H, W), heat maps (N, H, W) and not below 0; ``confidence`` is of the class predicted.
    """

    images: np.ndarray
    maps: np.ndarray
    true: tuple[str, ...]
    predicted: tuple[str, ...]
    confidence: tuple[float, ...]
    split: str


@dataclass(frozen=True)
class Pictures:
    """All pictures that a run allows; ``missing`` has a line for each other one, by field name."""

    spectra: Spectra | None = None
    projection: Projection | None = None
    heat_maps: HeatMaps | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


def spectrum(signals: Tensor) -> Tensor:
    """Magnitude of the discrete Fourier transform over the last axis: (..., T) to (..., F)."""
    magnitude: Tensor = torch.fft.rfft(signals).abs()
    return magnitude


def spatial_frequencies(length: int) -> Tensor:
    """Frequency of every value of a spectrum in cycles per latent, from 0 to 1/2, (F,)."""
    cycles: Tensor = torch.fft.rfftfreq(length)
    return cycles


def class_means(batches: Iterable[tuple[Tensor, Tensor]], classes: Sequence[int]) -> Tensor:
    """Mean latents of each class, (K, T), from batches of latents (N, T) and labels (N,); other classes are left out.

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

    Both are spectra (K, F), F at least 2. 1 is a frequency like any other. The constant component is left out.
    """
    rest, strongest = latents[:, 1:], basis[:, 1:].argmax(1, keepdim=True)
    return rest.gather(1, strongest)[:, 0] / rest.median(1).values.clamp(min=torch.finfo(rest.dtype).tiny)


def project(rows: np.ndarray, seed: int = 0) -> np.ndarray:
    """Project rows (K, D) to two dimensions, (K, 2), with scikit-learn's t-SNE; a seed always gives the same.

    Raises:
        UsageError: there are too few rows.
        UnusableInputError: scikit-learn is not installed.
    """
    if len(rows) < FEWEST:
        raise UsageError(f"t-SNE needs {FEWEST} classes or more, not {len(rows)}.")
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise UnusableInputError('t-SNE needs scikit-learn: pip install "snugfit[demo]".') from error
    perplexity = min(PERPLEXITY, (len(rows) - 1) / 3)
    return np.asarray(TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(rows))


def nearest(rows: np.ndarray) -> np.ndarray:
    """Index of the row nearest to each in Euclidean distance, (K, D) to (K,)."""
    squares = (rows**2).sum(1)
    distances = squares[:, None] + squares - 2 * rows @ rows.T
    np.fill_diagonal(distances, np.inf)
    return np.asarray(distances.argmin(1))


def group_agreement(rows: np.ndarray, groups: Sequence[str]) -> tuple[float, float]:
    """Share of rows (K, D) whose nearest row is of their own group; and the share expected of a random neighbour."""
    names = np.asarray(groups)
    same = names[:, None] == names
    expected = (same.sum(1) - 1).mean() / (len(names) - 1)
    return float((names[nearest(rows)] == names).mean()), float(expected)


def closest_pair(rows: np.ndarray) -> tuple[int, int]:
    """Indices of the two rows of (K, D) that are nearest to each other."""
    others = nearest(rows)
    gaps = ((rows - rows[others]) ** 2).sum(1)
    first = int(gaps.argmin())
    return first, int(others[first])


class Explained(NamedTuple):
    """Heat maps (B, H, W), not below 0; the class (B,) that each explains; and the logits (B, K)."""

    maps: Tensor
    classes: Tensor
    logits: Tensor


@torch.enable_grad()
def grad_cam(model: Callable[[Tensor], Tensor], images: Tensor) -> Explained:
    """Heat maps of images for the class that each is predicted to have.

    A channel of the last feature map A is weighted by the spatial mean of its gradient, and only the positive part of
    the sum is kept: ``ReLU(sum_k mean_ij(dy_c / dA_k_ij) A_k)``, upsampled bilinearly to the images. The model, in
    evaluation mode, maps normalised images (B, C, H, W) to logits (B, K).

    Raises:
        ModelError: no convolution of the model outputs a feature map of more than one pixel, or the logits ignore it.
    """
    seen = _LastMap()
    with seen:
        logits = model(images.detach().requires_grad_().clone())
    chosen = logits.argmax(1)
    if seen.features is None:
        raise ModelError("the model has no convolution whose output is a feature map, so there is nothing to explain.")
    score = logits.gather(1, chosen[:, None]).sum()
    (gradient,) = torch.autograd.grad(score, seen.features, allow_unused=True)
    if gradient is None:
        raise ModelError("the model's outputs do not depend on its last convolution, so there is nothing to explain.")
    weights = gradient.mean((2, 3), keepdim=True)
    maps = F.relu((weights * seen.features.detach()).sum(1, keepdim=True))
    upsampled = F.interpolate(maps, images.shape[-2:], mode="bilinear", align_corners=False)
    return Explained(upsampled[:, 0].detach(), chosen, logits.detach())


class _LastMap(TorchFunctionMode):
    """Keeps the last convolution's feature map after normalisation, residual sum and activation, before the next pool.

    Hooks see modules only, but residual sums and activations are often functions, above all in traced networks.
    ``features`` (B, C, H, W) is None until there is a feature map of more than a pixel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 4 and result.requires_grad:
            size = result.shape[-2:]
            is_map = func is F.conv2d and size.numel() > 1
            if is_map or (self.features is not None and size == self.features.shape[-2:]):
                self.features = result
        return result
