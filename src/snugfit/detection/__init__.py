"""Boxes, YOLOv2's loss, its anchors, and mAP: pure functions of tensors and arrays.

Boxes are (centre x, centre y, width, height) as fractions of the image's sides, unless a name says corners. Targets of
a batch are (B, M, 5), float: class, box; rows of class -1 pad images with fewer than M boxes. Outputs of a network are
(B, A (5 + C), H, W): for each of A anchors, x, y, width, height, objectness and C class logits.

>>> import torch
>>> outputs = torch.zeros(1, 5 * (5 + 2), 4, 4)  # two classes
>>> targets = torch.tensor([[[0, 0.5, 0.5, 0.25, 0.25]]])
>>> yolov2_loss(outputs, targets, COCO_ANCHORS) > 0
tensor(True)
>>> found = detections(outputs, COCO_ANCHORS, threshold=0.2)[0]
>>> found.boxes.shape[1], found.scores.max()
(4, tensor(0.2500))
"""

from snugfit.detection.boxes import COCO_ANCHORS, anchors_for, corners, non_maximum_suppression, pairwise_iou
from snugfit.detection.decoding import Detections, detections
from snugfit.detection.loss import yolov2_loss
from snugfit.detection.precision import MeanAveragePrecision, average_precision, true_positives

__all__ = [
    "COCO_ANCHORS",
    "Detections",
    "MeanAveragePrecision",
    "anchors_for",
    "average_precision",
    "corners",
    "detections",
    "non_maximum_suppression",
    "pairwise_iou",
    "true_positives",
    "yolov2_loss",
]
