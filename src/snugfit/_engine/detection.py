"""What detection decides: how images with boxes are read and batched, and what a model must output."""

from __future__ import annotations

from typing import Any

from snugfit._chain import Chain
from snugfit._core.request import Request
from snugfit._data import Splits
from snugfit._data.boxed import BoxedBatches, box_sizes, boxed_path, load_boxed
from snugfit._data.boxes import BoxedImages
from snugfit._engine.tasks import TaskRules
from snugfit.detection import anchors_for
from snugfit.errors import ModelError, UsageError


def _facts(request: Request, chain: Chain, splits: Splits) -> dict[str, Any]:
    classes, shape = len(splits.class_names), tuple(chain.head.output_shape)
    if not isinstance(splits.train, BoxedImages):
        raise UsageError("the data has no boxes; --task detect takes a folder with images and labels, or one of COCO.")
    if request.training.erase:
        raise UsageError("--erase would hide objects but keep their boxes; leave it out for --task detect.")
    if request.training.label_smoothing:
        raise UsageError("--label-smoothing applies to cross entropy; leave it out for --task detect.")
    if request.training.mixes:
        raise UsageError(f"{request.training.mixes} mixes classes of images; leave it out for --task detect.")
    if request.training.class_weights is not None:
        raise UsageError("--class-weights applies to cross entropy; leave it out for --task detect.")
    if request.training.loss != "cross-entropy":
        raise UsageError(f"--loss {request.training.loss} is to classify; leave it out for --task detect.")
    if len(shape) != 3 or shape[0] % (5 + classes):
        raise ModelError(
            f"{request.model.model} gives outputs of shape {shape} per image, but to detect {classes} classes it must "
            f"output feature maps of {5 + classes} channels for each anchor, as yolov2_16 does."
        )
    anchors = anchors_for(box_sizes(splits.train), shape[0] // (5 + classes))
    return {"task": "detect", "anchors": anchors, "most_boxes": splits.train.most}


def _place(name: str, data_dir: str | None) -> str:
    return str(boxed_path(name, data_dir).absolute())


RULES = TaskRules(load_boxed, BoxedBatches, _place, 0.0003, _facts, crops=False)
