"""YOLOv2's loss, as darknet's region layer computes it (``region_layer.c`` with the settings of ``yolov2.cfg``).

The paper (Redmon and Farhadi, 2017) gives the predictions, section 2, and not the loss; darknet writes its gradient.
This loss has that gradient: half of squared errors of the sigmoid offsets, of the logarithms of sizes and of the
sigmoid objectness, and the cross entropy of the softmax over classes. One predictor is responsible for a box: in the
cell of the box's centre, the one whose anchor has the most similar shape (``bias_match``). If it is responsible for
several boxes, only the last one counts. Its objectness should be its overlap with the box (``rescore``); that of all
others 0, unless they overlap a box by more than 0.6. Errors of coordinates are weighted by 2 - width * height, so that
small boxes weigh more.

Darknet's term that draws boxes to their anchors during the first 12,800 images is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from snugfit.detection.boxes import pairwise_iou, shape_iou
from snugfit.detection.decoding import boxes_of, fields_of


@dataclass(frozen=True)
class LossScales:
    """Weights of the parts; by default those of ``yolov2.cfg``.

    Attributes:
        coordinates: of offsets and sizes.
        objects: of the objectness of responsible predictors.
        no_objects: of the objectness of the others.
        classes: of the class.
        ignored_above: the objectness of a predictor that overlaps a box by more than this has no loss.
    """

    coordinates: float = 1.0
    objects: float = 5.0
    no_objects: float = 1.0
    classes: float = 1.0
    ignored_above: float = 0.6


_DARKNET = LossScales()


@dataclass(frozen=True)
class Answers:
    """The predictor that is responsible for each target; all tensors are (B, M).

    Attributes:
        counts: whether the target is a box, and no later box has the same predictor.
        slot: number of the predictor among the A H W ones of an image, 0 for padding.
        anchor, row, column: the parts of that number.
    """

    counts: Tensor
    slot: Tensor
    anchor: Tensor
    row: Tensor
    column: Tensor


def yolov2_loss(
    outputs: Tensor, targets: Tensor, anchors: Sequence[Sequence[float]], scales: LossScales = _DARKNET
) -> Tensor:
    """Sum over predictors, mean over images (scalar).

    The shapes of its tensors do not depend on the number of boxes.

    Args:
        outputs: (B, A (5 + C), H, W).
        targets: (B, M, 5): class (-1: none), centre x and y, width, height.
        anchors: widths and heights, A of them, as fractions of the image's sides.
        scales: weights of the parts.
    """
    fields = fields_of(outputs, len(anchors))
    priors = fields.new_tensor(anchors)
    real = targets[..., 0] >= 0
    truths = torch.where(real[..., None], targets[..., 1:], 1.0).to(fields.dtype)
    answers = assign(truths, real, priors, (fields.shape[-2], fields.shape[-1]))
    with torch.no_grad():
        boxes = boxes_of(fields, priors).flatten(1, 3)
        free = torch.stack([_free(*each, scales) for each in zip(boxes, truths, real, strict=True)])
        free.scatter_reduce_(1, answers.slot, (~answers.counts).to(free.dtype), "amin")
    objectness = fields[:, :, 4].sigmoid()
    nothing = (free * objectness.flatten(1) ** 2).sum() * scales.no_objects / 2
    return (nothing + _of_boxes(fields, truths, targets[..., 0], priors, answers, scales)) / len(fields)


def assign(truths: Tensor, real: Tensor, priors: Tensor, cells: tuple[int, int]) -> Answers:
    """Find the predictor that is responsible for each box.

    Args:
        truths: boxes (B, M, 4).
        real: whether each is one, (B, M).
        priors: anchors (A, 2).
        cells: rows and columns of the feature map.
    """
    rows, columns = cells
    column = (truths[..., 0] * columns).long().clamp(0, columns - 1)
    row = (truths[..., 1] * rows).long().clamp(0, rows - 1)
    anchor = shape_iou(truths[..., 2:], priors).argmax(dim=-1)
    slot = (anchor * rows + row) * columns + column
    later = torch.ones(slot.shape[1], slot.shape[1], dtype=torch.bool, device=slot.device).triu(1)
    taken = ((slot[:, :, None] == slot[:, None, :]) & later & real[:, None, :]).any(dim=2)
    return Answers(real & ~taken, torch.where(real, slot, 0), anchor, row, column)


def _free(boxes: Tensor, truths: Tensor, real: Tensor, scales: LossScales) -> Tensor:
    """1 for each predicted box (P, 4) of an image that overlaps all boxes (M, 4) little, 0 for others: (P,)."""
    if not len(truths):
        return boxes.new_ones(len(boxes))
    best = (pairwise_iou(boxes, truths) * real).amax(dim=1)
    return (best <= scales.ignored_above).to(boxes.dtype)


def _of_boxes(
    fields: Tensor, truths: Tensor, classes: Tensor, priors: Tensor, answers: Answers, scales: LossScales
) -> Tensor:
    """Loss (scalar) of the predictors that are responsible for boxes.

    Args:
        fields: outputs (B, A, 5 + C, H, W).
        truths: boxes (B, M, 4).
        classes: their classes (B, M).
        priors: anchors (A, 2).
        answers: the responsible predictors.
        scales: weights of the parts.
    """
    images = torch.arange(len(fields), device=fields.device)[:, None]
    said = fields[images, answers.anchor, :, answers.row, answers.column]
    counts, cells = answers.counts.to(said.dtype), said.new_tensor([fields.shape[-1], fields.shape[-2]])
    corner = torch.stack([answers.column, answers.row], dim=-1)
    offset, prior = said[..., :2].sigmoid(), priors[answers.anchor]
    wrong = (truths[..., :2] * cells - corner - offset) ** 2
    wrong = wrong + ((truths[..., 2:] / prior).log() - said[..., 2:4]) ** 2
    near = (2 - truths[..., 2] * truths[..., 3]) * wrong.sum(dim=-1)
    with torch.no_grad():
        size = prior * said[..., 2:4].clamp(max=10).exp()
        box = torch.cat([(offset + corner) / cells, size], dim=-1)
        overlap = pairwise_iou(box[..., None, :], truths[..., None, :])[..., 0, 0]
    sure = (overlap - said[..., 4].sigmoid()) ** 2
    logits = said[..., 5:].flatten(0, 1)
    kind = F.cross_entropy(logits, classes.clamp(min=0).long().flatten(), reduction="none").view_as(counts)
    each = scales.coordinates / 2 * near + scales.objects / 2 * sure + scales.classes * kind
    return (counts * each).sum()
