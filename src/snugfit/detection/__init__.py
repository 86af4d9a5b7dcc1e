"""Boxes, YOLOv2's loss, its anchors, and mAP: pure functions of tensors and arrays.

Boxes are (centre x, centre y, width, height) as fractions of the image's sides, unless a name says corners. Targets of
a batch are (B, M, 5), float: class, box; rows of class -1 pad images with fewer than M boxes. Outputs of a network are
(B, A (5 + C), H, W): for each of A anchors, x, y, width, height, objectness and C class logits.
"""

from snugfit.detection.anchors import COCO_ANCHORS, anchors_for
from snugfit.detection.boxes import corners, pairwise_iou, suppressed
from snugfit.detection.decoding import Detections, detections
from snugfit.detection.loss import LossScales, yolov2_loss
from snugfit.detection.precision import MeanAveragePrecision, average_precision, matches

__all__ = [
    "COCO_ANCHORS",
    "Detections",
    "LossScales",
    "MeanAveragePrecision",
    "anchors_for",
    "average_precision",
    "corners",
    "detections",
    "matches",
    "pairwise_iou",
    "suppressed",
    "yolov2_loss",
]
