"""What a task decides in addition to loss and metric: how data is read and batched, and what a model must output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snugfit import _data as datasets
from snugfit._chain import Chain
from snugfit._core.request import Request
from snugfit._core.workload import TaskName
from snugfit._data import Batches, BoxedBatches, BoxedImages, Splits, box_sizes, boxed_path, image_folder
from snugfit.detection import anchors_for
from snugfit.errors import ModelError, UsageError


@dataclass(frozen=True)
class TaskRules:
    """What one task decides.

    Attributes:
        place: the name of data with an absolute path if it is a folder or file; other names unchanged.
        lr: learning rate, if it is not an optimizer's own: YOLOv2's loss is a sum over a thousand predictors.
        facts: fields of the workload that depend on chain and data; refuses a model with other outputs.
        crops: whether images are cropped to the square, or resized to it.
    """

    load: Callable[..., Splits]
    batches: Callable[..., Batches]
    place: Callable[[str, str | None], str]
    lr: float | None
    facts: Callable[[Request, Chain, Splits], dict[str, Any]]
    crops: bool


def _logits(request: Request, chain: Chain, splits: Splits) -> dict[str, Any]:
    classes, shape = len(splits.class_names), tuple(chain.head.output_shape)
    if isinstance(splits.train, BoxedImages):
        raise UsageError("the data has boxes; --task detect trains on them.")
    if shape != (classes,):
        boxes = "; --task detect takes a model that outputs feature maps of boxes" if len(shape) == 3 else ""
        raise ModelError(
            f"{request.model.model} gives outputs of shape {shape} per image, "
            f"but {splits.name} has {classes} classes; make it end in {classes} logits{boxes}."
        )
    return {}


def _boxes(request: Request, chain: Chain, splits: Splits) -> dict[str, Any]:
    classes, shape = len(splits.class_names), tuple(chain.head.output_shape)
    if not isinstance(splits.train, BoxedImages):
        raise UsageError("the data has no boxes; --task detect takes a folder with images and labels, or one of COCO.")
    if request.training.erase:
        raise UsageError("--erase would hide objects but keep their boxes; leave it out for --task detect.")
    if request.training.label_smoothing:
        raise UsageError("--label-smoothing applies to cross entropy; leave it out for --task detect.")
    if len(shape) != 3 or shape[0] % (5 + classes):
        raise ModelError(
            f"{request.model.model} gives outputs of shape {shape} per image, but to detect {classes} classes it must "
            f"output feature maps of {5 + classes} channels for each anchor, as yolov2_16 does."
        )
    anchors = anchors_for(box_sizes(splits.train), shape[0] // (5 + classes))
    return {"task": "detect", "anchors": anchors, "most_boxes": splits.train.most}


def _folder(name: str, data_dir: str | None) -> str:
    kind, _, path = name.partition(":")
    return f"folder:{image_folder(path, data_dir).absolute()}" if kind == "folder" else name


def _boxed(name: str, data_dir: str | None) -> str:
    return str(boxed_path(name, data_dir).absolute())


RULES: dict[TaskName, TaskRules] = {
    "classify": TaskRules(datasets.load, Batches, _folder, None, _logits, crops=True),
    "detect": TaskRules(datasets.load_boxed, BoxedBatches, _boxed, 0.0003, _boxes, crops=False),
}
