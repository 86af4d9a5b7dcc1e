"""Labels of images that may have several: 0 or 1 for each class, (N, classes) uint8."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from snugfit.errors import DataError


def is_vector(label: Any) -> bool:
    """Whether the label of an item is 0 or 1 for each class; a single integer in brackets is the number of a class."""
    if not isinstance(label, (torch.Tensor, np.ndarray, list, tuple)):
        return False
    values = np.asarray(label)
    return values.ndim == 1 and (values.size > 1 or values.dtype.kind == "f")


def label_vectors(labels: Iterable[Any], count: int, name: str) -> np.ndarray:
    """Label vectors of ``count`` items, each (classes,), as one array (count, classes) uint8.

    Raises:
        DataError: they differ in length, or hold something else than 0 and 1.
    """
    found: np.ndarray | None = None
    for index, label in enumerate(labels):
        values = np.asarray(label)
        found = np.zeros((count, values.size), np.uint8) if found is None else found
        if values.shape != found.shape[1:]:
            raise DataError(
                f"the label of item {index} of the {name} data set has shape {values.shape}, but the first has "
                f"{found.shape[1:]}. Give a 0 or 1 for each class."
            )
        if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
            raise DataError(
                f"the label of item {index} of the {name} data set holds something else than 0 and 1. Give a 0 or 1 "
                "for each class; or, if every item has one class, its number."
            )
        found[index] = values
    if found is None or not found.shape[1]:
        raise DataError(f"the labels of the {name} data set are empty. Give a 0 or 1 for each class.")
    return found


def targets_of(labels: np.ndarray) -> torch.Tensor:
    """Targets of a loss: labels (B,) as they are, and 0 and 1 of each class, (B, classes), as float32."""
    targets = torch.from_numpy(labels)
    return targets.float() if targets.dim() > 1 else targets


def class_counts(labels: np.ndarray, classes: int) -> np.ndarray:
    """Images of each class, (classes,) int64, by labels (N,) or (N, classes)."""
    return labels.sum(0, dtype=np.int64) if labels.ndim > 1 else np.bincount(labels, minlength=classes)


def strata(labels: np.ndarray, least: int = 1) -> np.ndarray:
    """Groups of images, (N,) int64, by which a data set is divided; of labels (N,) these themselves.

    An image with several labels, (N, classes), is in the group of its rarest one, and one without labels in a group of
    its own. Groups of fewer than ``least`` images join the largest.
    """
    if labels.ndim == 1:
        return labels
    counts = class_counts(labels, labels.shape[1])
    order = np.argsort(counts, kind="stable")
    ranked = np.column_stack([labels[:, order], np.ones(len(labels), np.uint8)])
    groups: np.ndarray = np.append(order, labels.shape[1])[ranked.argmax(1)]
    sizes = np.bincount(groups)
    return np.where(sizes[groups] < least, sizes.argmax(), groups).astype(np.int64)
