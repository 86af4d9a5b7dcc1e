"""What the user should know about the number of training images of each class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from snugfit._data.multi_label import class_counts

FEW_IMAGES = 100
"""Training images of a class below which a notice says that they are few."""
FEW_PRETRAINED = 20
"""The same with pre-trained weights."""
UNBALANCED = 5
"""Ratio of the largest class to the smallest above which a notice says that classes are unbalanced."""


def class_notes(
    labels: np.ndarray, names: Sequence[str], *, weighted: bool = False, pretrained: bool = False
) -> list[str]:
    """Notices about training labels (N,) or (N, classes); none on balance if classes are ``weighted``."""
    enough = FEW_PRETRAINED if pretrained else FEW_IMAGES
    counts = class_counts(labels, len(names))
    least, most = int(counts.argmin()), int(counts.argmax())
    smallest, largest = int(counts[least]), int(counts[most])
    notes = []
    if smallest < enough:
        few = int((counts < enough).sum())
        advice = "" if pretrained else f"; with pre-trained --weights, {FEW_PRETRAINED} may be enough"
        notes.append(
            f"{few} of {len(names)} classes have fewer than {enough} training images, '{names[least]}' has "
            f"{smallest}{advice}"
        )
    if smallest and largest > UNBALANCED * smallest and not weighted:
        notes.append(
            f"classes are unbalanced: '{names[most]}' has {largest} training images, '{names[least]}' has {smallest}; "
            "--class-weights balanced counts rare classes more (backprop and checkpoint)"
        )
    return notes
