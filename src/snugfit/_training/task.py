"""What is learned of images: the class of each, or boxes around objects; its loss and what validation measures.

A strategy whose step is one loss of the whole network asks :func:`task_of` for all that depends on it. Outputs are what
the network gives; targets are labels (B,) int64, or boxes (B, M, 5) as :mod:`snugfit.detection` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from snugfit._core.workload import Workload
from snugfit.detection import MeanAveragePrecision, detections, yolov2_loss
from snugfit.detection.precision import THRESHOLD


@dataclass(frozen=True)
class Score:
    """How well a network did on a split.

    Attributes:
        value: accuracy or mAP50, in [0, 1].
        samples: images.
        top5: share of images whose class is among the five likeliest; None where that means nothing.
        confusion: rows are true classes; empty where that means nothing.
        per_class: accuracy or average precision of each class; None for a class that has no samples, in detection.
    """

    value: float
    samples: int
    top5: float | None = None
    confusion: list[list[int]] = field(default_factory=list)
    per_class: list[float | None] = field(default_factory=list)


class Tally(Protocol):
    """Gathers what a network says of a split, batch by batch."""

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch, on the CPU."""

    def score(self) -> Score:
        """What it comes to."""


class Task(Protocol):
    """What is learned."""

    metric: ClassVar[str]
    """Name of what validation measures."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over the batch (scalar), whose gradient trains the network."""

    def correct(self, outputs: Tensor, targets: Tensor) -> int | None:
        """Samples of a training batch that are right; None where only a whole split tells."""

    def made_up_targets(self, batch: int, device: str) -> Tensor:
        """Targets of a made-up batch that take as much memory as any; on the meta device without values."""

    def tally(self) -> Tally:
        """An empty tally."""


class ClassTally:
    """Confusion matrix (classes, classes), int64, rows are true classes; and labels among the five largest logits."""

    def __init__(self, classes: int) -> None:
        self.classes, self.among_five = classes, 0
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in logits (B, classes) and labels (B,)."""
        count = self.classes
        places = torch.bincount(targets * count + outputs.argmax(1), minlength=count * count)
        self.confusion += places.view_as(self.confusion)
        self.among_five += int((outputs.topk(min(5, count), dim=1).indices == targets[:, None]).any(1).sum())

    def score(self) -> Score:
        """Accuracies."""
        samples, right = int(self.confusion.sum()), self.confusion.diagonal()
        shares: list[float | None] = (right / self.confusion.sum(1).clamp(min=1)).tolist()
        least = max(samples, 1)
        return Score(int(right.sum()) / least, samples, self.among_five / least, self.confusion.tolist(), shares)


class BoxTally:
    """Average precision of the boxes that a network finds."""

    def __init__(self, classes: int, anchors: tuple[tuple[float, float], ...]) -> None:
        self._precision, self._anchors, self._samples = MeanAveragePrecision(classes), anchors, 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in raw predictions (B, A (5 + C), H, W) and boxes (B, M, 5)."""
        self._samples += len(targets)
        for found, truths in zip(detections(outputs, self._anchors, THRESHOLD), targets, strict=True):
            self._precision.add(found, truths)

    def score(self) -> Score:
        """mAP50."""
        return Score(self._precision.value, self._samples, per_class=self._precision.per_class)


@dataclass(frozen=True)
class Classification:
    """One class per image, by cross entropy."""

    metric: ClassVar[str] = "accuracy"
    classes: int

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of logits (B, classes)."""
        return F.cross_entropy(outputs, targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> int | None:
        """Samples whose largest logit is that of their class."""
        return int((outputs.detach().argmax(1) == targets).sum())

    def made_up_targets(self, batch: int, device: str) -> Tensor:
        """Random labels (B,)."""
        labels = torch.zeros(batch, dtype=torch.int64, device=device)
        return labels if device == "meta" else labels.random_(0, self.classes)

    def tally(self) -> Tally:
        """Counts classes."""
        return ClassTally(self.classes)


@dataclass(frozen=True)
class Detection:
    """Boxes with classes, by YOLOv2's loss."""

    metric: ClassVar[str] = "mAP50"
    classes: int
    anchors: tuple[tuple[float, float], ...]
    most_boxes: int

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """YOLOv2's loss of raw predictions (B, A (5 + C), H, W)."""
        return yolov2_loss(outputs, targets, self.anchors)

    def correct(self, outputs: Tensor, targets: Tensor) -> int | None:
        """Nothing: precision is that of a whole split."""
        return None

    def made_up_targets(self, batch: int, device: str) -> Tensor:
        """As many boxes in every image as any image has, (B, M, 5)."""
        targets = torch.zeros(batch, self.most_boxes, 5, device=device)
        if device != "meta":
            targets.uniform_(0.1, 0.9)[..., 0].random_(0, self.classes)
        return targets

    def tally(self) -> Tally:
        """Measures precision."""
        return BoxTally(self.classes, self.anchors)


def task_of(workload: Workload) -> Task:
    """What a workload learns."""
    if workload.task == "detect":
        return Detection(workload.classes, workload.anchors, workload.most_boxes)
    return Classification(workload.classes)


def needs_classes(workload: Workload) -> list[str]:
    """Why a strategy that needs one class for each image cannot serve a workload; empty where it can."""
    if workload.task == "classify":
        return []
    return ["its losses need one class for each image; boxes train with backprop, checkpoint or tiled"]


@torch.no_grad()
def measure(
    task: Task, forward: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor]], device: torch.device
) -> Tally:
    """Run a network on a split and gather what it says.

    Args:
        task: what it has learned.
        forward: images or activations (B, ...) to outputs, in evaluation mode.
        batches: pairs of inputs and targets.
        device: where to compute.
    """
    tally = task.tally()
    for inputs, targets in batches:
        tally.add(forward(inputs.to(device)).float().cpu(), targets)
    return tally
