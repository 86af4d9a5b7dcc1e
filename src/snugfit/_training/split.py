"""The data of a run as training sees it."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit._training.loop import BatchSource


@dataclass(frozen=True)
class TrainingData:
    """Three disjoint splits as batches; the test split chooses nothing.

    Attributes:
        train, val, test: batches; ``test`` is None where the data set has no such split.
        class_names: names of the classes, by label.
        retrain: images that a network was trained on before, where there are some; their labels mean nothing here.
    """

    train: BatchSource
    val: BatchSource
    test: BatchSource | None
    class_names: tuple[str, ...]
    retrain: BatchSource | None = None
