"""Classes in two dimensions: t-SNE of a local loss's learned combinations (LLS section 4.3, Figure 3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from snugfit.errors import UnusableInputError, UsageError

FEWEST = 4
"""Fewest rows that t-SNE can place: its perplexity, a third of the others, is 1 then."""

PERPLEXITY = 30.0


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


def kinship(rows: np.ndarray, groups: Sequence[str]) -> tuple[float, float]:
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
