"""Decode a network's outputs into boxes (YOLOv2, section 2, "Direct location prediction")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snugfit.detection.boxes import non_maximum_suppression

MOST = 100
"""Largest number of boxes per image; COCO's limit."""
OVERLAP = 0.45
"""Boxes that overlap by more are suppressed; darknet's value."""
_CANDIDATES = 512
_LARGEST_LOG = 10.0


@dataclass(frozen=True)
class Detections:
    """Boxes (K, 4) found in one image, in the order of falling scores (K,), and their classes (K,) int64.

    A score is the objectness times the probability of the class.
    """

    boxes: Tensor
    scores: Tensor
    classes: Tensor


def fields_of(outputs: Tensor, anchors: int) -> Tensor:
    """Outputs (B, A (5 + C), H, W) as (B, A, 5 + C, H, W), in float32 at least."""
    images, _, rows, columns = outputs.shape
    fields = outputs.reshape(images, anchors, -1, rows, columns)
    return fields.float() if fields.dtype in (torch.bfloat16, torch.float16) else fields


def boxes_of(fields: Tensor, anchors: Tensor) -> Tensor:
    """Boxes (B, A, H, W, 4): a sigmoid offset in the cell, and the anchor's size (A, 2) times the exponential.

    Logarithms of sizes are clamped to 10, so that boxes stay finite.
    """
    rows, columns = fields.shape[-2:]
    across = torch.arange(columns, device=fields.device, dtype=fields.dtype)
    down = torch.arange(rows, device=fields.device, dtype=fields.dtype)[:, None]
    x, y = (fields[:, :, 0].sigmoid() + across) / columns, (fields[:, :, 1].sigmoid() + down) / rows
    sizes = [anchors[:, i, None, None] * fields[:, :, 2 + i].clamp(max=_LARGEST_LOG).exp() for i in range(2)]
    return torch.stack([x, y, *sizes], dim=-1)


@torch.no_grad()
def detections(
    outputs: Tensor, anchors: Sequence[Sequence[float]], threshold: float, most: int = MOST
) -> list[Detections]:
    """Boxes of each image: the likeliest class of every predictor, after non-maximum suppression.

    Args:
        outputs: (B, A (5 + C), H, W).
        anchors: widths and heights, A of them.
        threshold: smallest score.
        most: largest number of boxes per image; those with the highest scores are kept.
    """
    fields = fields_of(outputs, len(anchors))
    return [_of_image(each[None], fields.new_tensor(anchors), threshold, most) for each in fields]


def _of_image(fields: Tensor, anchors: Tensor, threshold: float, most: int) -> Detections:
    boxes = boxes_of(fields, anchors).reshape(-1, 4)
    likeliest = fields[0, :, 5:].softmax(dim=1).max(dim=1)
    scores = (fields[0, :, 4].sigmoid() * likeliest.values).flatten()
    found = scores.topk(min(_CANDIDATES, len(scores)))
    chosen = found.indices[found.values >= threshold].cpu()
    boxes, classes = boxes.cpu()[chosen], likeliest.indices.flatten().cpu()[chosen]
    kept = non_maximum_suppression(boxes, classes, OVERLAP).nonzero()[:most, 0]
    return Detections(boxes[kept], scores.cpu()[chosen][kept], classes[kept])
