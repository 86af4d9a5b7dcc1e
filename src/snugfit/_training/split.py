"""The data of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from snugfit._training.trainable import BatchSource


@dataclass(frozen=True)
class TrainingData:
    """Three disjoint splits as batches; no decision uses the test split.

    Attributes:
        train, val, test: batches; ``test`` is None if the data set has no such split.
        class_names: names of the classes, by label.
        others: training images of other data sets that options of strategies name, by option.
    """

    train: BatchSource
    val: BatchSource
    test: BatchSource | None
    class_names: tuple[str, ...]
    others: Mapping[str, BatchSource] = field(default_factory=dict)
