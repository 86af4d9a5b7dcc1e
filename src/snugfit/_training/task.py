"""The task: one class per image, several labels, or boxes; with its loss, its steps and its validation measure.

A strategy with one loss of the whole network gets everything that depends on the task from :func:`task_of`. Outputs are
those of the network. Targets are labels (B,) int64, probabilities (B, classes) of mixed images in training, a 0 or 1
for each class (B, classes) float32, or boxes (B, M, 5) as in :mod:`snugfit.detection`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from snugfit._core.workload import Precision, Workload
from snugfit._training.average_precision import Scores
from snugfit._training.losses import Loss, binary_loss, focal_loss
from snugfit._training.own_metrics import Metric, update
from snugfit.detection import MeanAveragePrecision, detections, yolov2_loss
from snugfit.detection.precision import THRESHOLD
from snugfit.errors import UsageError, first_line
from snugfit.memory.autocast import autocast

LEAST_SAMPLES = 20
"""Samples below which an accuracy does not tell whether a network guesses."""


@dataclass(frozen=True)
class Score:
    """The result of a network on a split.

    Attributes:
        value: accuracy, mAP or mAP50, in [0, 1].
        samples: images.
        top5: share of images whose class is among the five likeliest; None if not applicable.
        confusion: rows are true classes; empty if not applicable.
        per_class: accuracy or average precision of each class; the latter is None for a class without samples.
    """

    value: float
    samples: int
    top5: float | None = None
    confusion: list[list[int]] = field(default_factory=list)
    per_class: list[float | None] = field(default_factory=list)

    @property
    def mean_of_classes(self) -> tuple[float, int]:
        """Mean accuracy of the classes with samples, and their number; (0, 0) without a confusion matrix."""
        found = [row[label] / sum(row) for label, row in enumerate(self.confusion) if sum(row)]
        return (sum(found) / len(found), len(found)) if found else (0.0, 0)

    @property
    def at_chance(self) -> bool:
        """Whether classes are told apart no better than by guessing, within a standard error; not for few samples."""
        mean, classes = self.mean_of_classes
        if classes < 2 or self.samples < LEAST_SAMPLES:
            return False
        chance = 1 / classes
        return mean <= chance + math.sqrt(chance * (1 - chance) / self.samples)


class _ClassEvaluator:
    """Confusion matrix (classes, classes), int64, rows are true classes; and labels among the five largest logits."""

    def __init__(self, classes: int) -> None:
        self.classes, self.among_five = classes, 0
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add logits (B, classes) and labels (B,)."""
        count = self.classes
        cells = torch.bincount(targets * count + outputs.argmax(1), minlength=count * count)
        self.confusion += cells.view_as(self.confusion)
        self.among_five += int((outputs.topk(min(5, count), dim=1).indices == targets[:, None]).any(1).sum())

    def score(self) -> Score:
        """Accuracies."""
        samples, right = int(self.confusion.sum()), self.confusion.diagonal()
        shares: list[float | None] = (right / self.confusion.sum(1).clamp(min=1)).tolist()
        least = max(samples, 1)
        return Score(int(right.sum()) / least, samples, self.among_five / least, self.confusion.tolist(), shares)


class _LabelEvaluator:
    """Mean average precision of several labels per image, over the classes that images have."""

    def __init__(self, classes: int) -> None:
        self._scores = Scores(classes)

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add logits (B, classes), and targets (B, classes) of 0 and 1."""
        self._scores.add(outputs, targets)

    def score(self) -> Score:
        """Its mAP."""
        found = self._scores.per_class()
        known = [value for value in found if value is not None]
        return Score(sum(known) / max(len(known), 1), len(self._scores), per_class=found)


class _BoxEvaluator:
    """Average precision of a network's boxes."""

    def __init__(self, classes: int, anchors: tuple[tuple[float, float], ...]) -> None:
        self._precision, self._anchors, self._samples = MeanAveragePrecision(classes), anchors, 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add raw predictions (B, A (5 + C), H, W) and boxes (B, M, 5)."""
        self._samples += len(targets)
        for found, truths in zip(detections(outputs, self._anchors, THRESHOLD), targets, strict=True):
            self._precision.add(found, truths)

    def score(self) -> Score:
        """mAP50."""
        return Score(self._precision.value, self._samples, per_class=self._precision.per_class)


def count_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Number of samples whose largest logit, (B, classes), is their label, (B,), or likeliest class, (B, classes).

    It is a tensor of shape (), so that nothing waits for the device.
    """
    likeliest = labels.argmax(1) if labels.dim() > 1 else labels
    return (logits.detach().argmax(1) == likeliest).sum()


@dataclass(frozen=True)
class Classification:
    """One class per image, by cross entropy with label smoothing (Szegedy et al., CVPR 2016, section 7).

    With ``class_weights`` it is the weighted mean, as in torch: the sum of weighted losses over the sum of weights.
    With ``focal``, its exponent, it is the focal loss; with an ``own`` loss, that. Targets of ``mixed`` images are
    probabilities.
    """

    metric: ClassVar[str] = "accuracy"
    classes: int
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] = ()
    focal: float | None = None
    own: Loss | None = None
    mixed: bool = False

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits (B, classes); on the meta device, where an own one may not run, cross entropy for it."""
        if self.own is not None and not outputs.is_meta:
            return self.own(outputs, targets)
        if self.focal is not None:
            return focal_loss(outputs, targets, self.focal)
        weight = outputs.new_tensor(self.class_weights) if self.class_weights else None
        return F.cross_entropy(outputs, targets, weight, label_smoothing=self.label_smoothing)

    def weight(self, targets: Tensor) -> Tensor | None:
        """Sum of the weights of labels (B,), by which means of parts of a batch count; None if images count."""
        if not self.class_weights:
            return None
        return torch.tensor(self.class_weights, dtype=torch.float64, device=targets.device)[targets].sum()

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Number of samples whose largest logit, (B, classes), is their class."""
        return count_correct(outputs, targets)

    def synthetic_targets(self, batch: int, device: str) -> Tensor:
        """Random labels (B,), or probabilities (B, classes) if mixed; without values on the meta device."""
        if self.mixed:
            return torch.full((batch, self.classes), 1 / self.classes, device=device)
        labels = torch.zeros(batch, dtype=torch.int64, device=device)
        return labels if device == "meta" else labels.random_(0, self.classes)

    def evaluator(self) -> _ClassEvaluator:
        """An evaluator of classes."""
        return _ClassEvaluator(self.classes)


class _WholeSplit:
    """A task whose measure needs a whole split."""

    def weight(self, targets: Tensor) -> Tensor | None:
        """None: images count the same in means, whatever targets (B, ...) they have."""
        return None

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """None, because precision needs a whole split; outputs are (B, ...)."""
        return None


@dataclass(frozen=True)
class MultiLabel(_WholeSplit):
    """Whether an image has each class, by binary cross entropy, the mean over images and classes.

    With ``focal``, its exponent, it is the binary focal loss; with an ``own`` loss, that.
    """

    metric: ClassVar[str] = "mAP"
    classes: int
    focal: float | None = None
    own: Loss | None = None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits (B, classes); on the meta device, where an own one may not run, binary cross entropy."""
        if self.own is not None and not outputs.is_meta:
            return self.own(outputs, targets)
        return binary_loss(outputs, targets, self.focal)

    def synthetic_targets(self, batch: int, device: str) -> Tensor:
        """Random 0 and 1, (B, classes); without values on the meta device."""
        targets = torch.zeros(batch, self.classes, device=device)
        return targets if device == "meta" else targets.random_(0, 2)

    def evaluator(self) -> _LabelEvaluator:
        """An evaluator of labels."""
        return _LabelEvaluator(self.classes)


@dataclass(frozen=True)
class Detection(_WholeSplit):
    """Boxes with classes, by YOLOv2's loss."""

    metric: ClassVar[str] = "mAP50"
    classes: int
    anchors: tuple[tuple[float, float], ...]
    most_boxes: int

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """YOLOv2's loss (scalar) of raw predictions (B, A (5 + C), H, W)."""
        return yolov2_loss(outputs, targets, self.anchors)

    def synthetic_targets(self, batch: int, device: str) -> Tensor:
        """Boxes (B, M, 5) with as many in every image as any image has; without values on the meta device."""
        targets = torch.zeros(batch, self.most_boxes, 5, device=device)
        if device != "meta":
            targets.uniform_(0.1, 0.9)[..., 0].random_(0, self.classes)
        return targets

    def evaluator(self) -> _BoxEvaluator:
        """An evaluator of precision."""
        return _BoxEvaluator(self.classes, self.anchors)


Task = Classification | MultiLabel | Detection


def task_of(workload: Workload, loss: Loss | None = None) -> Task:
    """The task of a workload, with a loss that was passed from Python, if any."""
    if workload.task == "detect":
        return Detection(workload.classes, workload.anchors, workload.most_boxes)
    smoothing, weights = workload.label_smoothing, workload.class_weights
    focal = workload.focal_gamma if workload.loss == "focal" else None
    if workload.task == "multi-label":
        return MultiLabel(workload.classes, focal, loss)
    return Classification(workload.classes, smoothing, weights, focal, loss, workload.mixed)


def needs_classes(workload: Workload) -> list[str]:
    """Why a strategy that needs one class per image cannot serve a workload; empty if it can."""
    if workload.task == "classify":
        return []
    others = "boxes" if workload.task == "detect" else "several labels"
    return [f"its losses need one class for each image; {others} train with backprop, checkpoint or tiled"]


@torch.no_grad()
def measure(
    task: Task,
    forward: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    metrics: Mapping[str, Metric] | None = None,
) -> Score:
    """Score a network in evaluation mode, from images or activations (B, ...) to outputs, on batches with targets.

    The metrics are given the same outputs and targets; those of several labels as integers.
    """
    evaluator = task.evaluator()
    for inputs, targets in batches:
        outputs = forward(inputs.to(device)).float().cpu()
        evaluator.add(outputs, targets)
        if metrics:
            update(metrics, outputs, targets.long())
    return evaluator.score()


class StepResult:
    """Mean loss over the batch, and its number of correct samples; None if single samples do not determine it.

    ``weight`` is what the batch counts in the mean of a step; its samples if None. A device that computes by itself is
    waited for where a value is read.
    """

    def __init__(
        self, loss: float | Tensor, correct: int | Tensor | None, weight: float | Tensor | None = None
    ) -> None:
        self._loss, self._correct, self._weight = loss, correct, weight

    @classmethod
    def of(
        cls,
        loss: Tensor,
        outputs: Tensor,
        targets: Tensor,
        correct: Callable[[Tensor, Tensor], Tensor | None] = count_correct,
        weight: Tensor | None = None,
    ) -> StepResult:
        """From loss (scalar), outputs, targets (B, ...) and weight; on the meta device there is nothing to read."""
        return cls(0.0, 0) if loss.is_meta else cls(loss.detach(), correct(outputs, targets), weight)

    @cached_property
    def loss(self) -> float:
        """The mean loss."""
        return float(self._loss)

    @cached_property
    def correct(self) -> int | None:
        """The number of correct samples, if single samples determine it."""
        return None if self._correct is None else int(self._correct)

    @cached_property
    def weight(self) -> float | None:
        """What the batch counts, if not its samples."""
        return None if self._weight is None else float(self._weight)


_NAMES = {"bfloat16": "BFloat16", "float16": "Half"}
"""As torch names precisions in its errors."""


@contextmanager
def precision_context(given: Tensor, precision: Precision) -> Iterator[None]:
    """Autocast to a 16-bit precision on the device of a tensor (B, ...); no effect for float32.

    Raises:
        UsageError: an operator does not support the precision on that device.
    """
    if precision == "float32":
        yield
        return
    try:
        with autocast(given.device.type, getattr(torch, precision)):
            yield
    except NotImplementedError as error:
        what = first_line(error)
        if f"not implemented for '{_NAMES[precision]}'" not in what:  # torch's own words; others are the network's
            raise
        raise UsageError(f"--precision {precision}: {what} on this device; use another one.") from error


def loss_of(
    forward: Callable[[Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    precision: Precision,
) -> tuple[Tensor, Tensor]:
    """The loss (scalar) and the outputs, such as logits (B, K), that ``forward`` makes of inputs (B, ...).

    The loss reads outputs in float16 as float32: it is scaled by more than the largest number in float16.
    """
    with precision_context(targets, precision):
        outputs = forward(inputs)
        outputs = outputs.float() if precision == "float16" else outputs
        return loss(outputs, targets), outputs
