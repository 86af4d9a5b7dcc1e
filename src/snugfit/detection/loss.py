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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from snugfit.detection.boxes import pairwise_iou, shape_iou
from snugfit.detection.decoding import boxes_of, fields_of

COORDINATES, OBJECTS, NO_OBJECTS, CLASSES = 1.0, 5.0, 1.0, 1.0
"""Weights of offsets and sizes, of the objectness of responsible predictors and of the others, and of the class."""
IGNORED_ABOVE = 0.6
"""The objectness of a predictor that overlaps a box by more than this has no loss."""


class AssignedAnchors(NamedTuple):
    """The predictor that is responsible for each target; all tensors are (B, M).

    Attributes:
        counts: whether the target is a box, and no later box has the same predictor.
        predictor: its index among the A H W ones of an image, 0 for padding.
        anchor, row, column: the parts of that index.
    """

    counts: Tensor
    predictor: Tensor
    anchor: Tensor
    row: Tensor
    column: Tensor


def yolov2_loss(outputs: Tensor, targets: Tensor, anchors: Sequence[Sequence[float]]) -> Tensor:
    """Sum over predictors, mean over images (scalar).

    The shapes of its tensors do not depend on the number of boxes.

    Args:
        outputs: (B, A (5 + C), H, W).
        targets: (B, M, 5): class (-1: none), centre x and y, width, height.
        anchors: widths and heights, A of them, as fractions of the image's sides.
    """
    fields = fields_of(outputs, len(anchors))
    priors = fields.new_tensor(anchors)
    real = targets[..., 0] >= 0
    truths = torch.where(real[..., None], targets[..., 1:], 1.0).to(fields.dtype)
    assigned = assign_anchors(truths, real, priors, (fields.shape[-2], fields.shape[-1]))
    with torch.no_grad():
        boxes = boxes_of(fields, priors).flatten(1, 3)
        background = torch.stack([_background(*each) for each in zip(boxes, truths, real, strict=True)])
        background.scatter_reduce_(1, assigned.predictor, (~assigned.counts).to(background.dtype), "amin")
    objectness = fields[:, :, 4].sigmoid()
    without_objects = (background * objectness.flatten(1) ** 2).sum() * NO_OBJECTS / 2
    return (without_objects + _loss_of_boxes(fields, targets[..., 0], truths, priors, assigned)) / len(fields)


def assign_anchors(truths: Tensor, real: Tensor, priors: Tensor, cells: tuple[int, int]) -> AssignedAnchors:
    """Assign to each box (B, M, 4) the anchor (A, 2) that predicts it, in one of ``cells`` (rows, columns).

    ``real`` (B, M) says which boxes are no padding.
    """
    rows, columns = cells
    column = (truths[..., 0] * columns).long().clamp(0, columns - 1)
    row = (truths[..., 1] * rows).long().clamp(0, rows - 1)
    anchor = shape_iou(truths[..., 2:], priors).argmax(dim=-1)
    index = (anchor * rows + row) * columns + column
    later = torch.ones(index.shape[1], index.shape[1], dtype=torch.bool, device=index.device).triu(1)
    taken = ((index[:, :, None] == index[:, None, :]) & later & real[:, None, :]).any(dim=2)
    return AssignedAnchors(real & ~taken, torch.where(real, index, 0), anchor, row, column)


def _background(boxes: Tensor, truths: Tensor, real: Tensor) -> Tensor:
    """1 for each predicted box (P, 4) of an image that overlaps all boxes (M, 4) little, 0 for others: (P,)."""
    if not len(truths):
        return boxes.new_ones(len(boxes))
    best = (pairwise_iou(boxes, truths) * real).amax(dim=1)
    return (best <= IGNORED_ABOVE).to(boxes.dtype)


def _loss_of_boxes(
    fields: Tensor, classes: Tensor, truths: Tensor, priors: Tensor, assigned: AssignedAnchors
) -> Tensor:
    """Loss (scalar) of the assigned anchors, for outputs (B, A, 5 + C, H, W) and boxes (B, M, 4) of classes (B, M)."""
    images = torch.arange(len(fields), device=fields.device)[:, None]
    predicted = fields[images, assigned.anchor, :, assigned.row, assigned.column]
    counts, cells = assigned.counts.to(predicted.dtype), predicted.new_tensor([fields.shape[-1], fields.shape[-2]])
    corner = torch.stack([assigned.column, assigned.row], dim=-1)
    offset, prior = predicted[..., :2].sigmoid(), priors[assigned.anchor]
    squared = (truths[..., :2] * cells - corner - offset) ** 2
    squared = squared + ((truths[..., 2:] / prior).log() - predicted[..., 2:4]) ** 2
    coordinates = (2 - truths[..., 2] * truths[..., 3]) * squared.sum(dim=-1)
    with torch.no_grad():
        size = prior * predicted[..., 2:4].clamp(max=10).exp()
        box = torch.cat([(offset + corner) / cells, size], dim=-1)
        overlap = pairwise_iou(box[..., None, :], truths[..., None, :])[..., 0, 0]
    objectness = (overlap - predicted[..., 4].sigmoid()) ** 2
    logits = predicted[..., 5:].flatten(0, 1)
    labels = classes.clamp(min=0).long().flatten()
    entropy = F.cross_entropy(logits, labels, reduction="none").view_as(counts)
    each = COORDINATES / 2 * coordinates + OBJECTS / 2 * objectness + CLASSES * entropy
    return (counts * each).sum()
