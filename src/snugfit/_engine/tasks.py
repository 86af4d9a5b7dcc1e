"""What a task decides in addition to loss and metric: how data is read and batched, and what a model must output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import numpy as np

from snugfit import _data as datasets
from snugfit import _models as models
from snugfit._chain import Chain
from snugfit._core.option_groups import TrainingOptions
from snugfit._core.options import BALANCED, data_sets_in, parse_weights
from snugfit._core.registry import import_strategies
from snugfit._core.request import Request
from snugfit._core.workload import TaskName
from snugfit._data import Batches, Splits, image_folder
from snugfit.errors import ModelError, UsageError
from snugfit.memory.process import library_import


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
    if splits.train.has_boxes:
        raise UsageError("the data has boxes; --task detect trains on them.")
    if splits.train.has_several_labels:
        raise UsageError("the labels are vectors with a 0 or 1 for each class; --task multi-label trains on them.")
    require_logits(request, chain, splits)
    return {"class_weights": _class_weights(request, splits), **loss_facts(request.training)}


def loss_facts(training: TrainingOptions) -> dict[str, Any]:
    """The loss, as fields of a workload."""
    gamma = {} if training.focal_gamma is None else {"focal_gamma": training.focal_gamma}
    return {"loss": training.loss, **gamma}


def require_logits(request: Request, chain: Chain, splits: Splits) -> None:
    """Refuse a model that does not give a logit for each class; raises ModelError."""
    classes, shape = len(splits.class_names), tuple(chain.head.output_shape)
    if shape != (classes,):
        boxes = "; --task detect takes a model that outputs feature maps of boxes" if len(shape) == 3 else ""
        raise ModelError(
            f"{request.model.model} gives outputs of shape {shape} per image, "
            f"but {splits.name} has {classes} classes; make it end in {classes} logits{boxes}."
        )


def _class_weights(request: Request, splits: Splits) -> tuple[float, ...]:
    """The weight of each class; ``balanced`` is images / (classes * images of the class), as in scikit-learn.

    Raises:
        UsageError: their number is not that of the classes, or a class to balance has no training image.
    """
    given, names = request.training.class_weights, splits.class_names
    if given is None:
        return ()
    if given != BALANCED:
        weights = parse_weights(given)
        if len(weights) != len(names):
            raise UsageError(
                f"--class-weights has {len(weights)} numbers, but {splits.name} has {len(names)} classes; give one for "
                f"each class, or {BALANCED}."
            )
        return weights
    counts = np.bincount(splits.train.labels, minlength=len(names))
    if not counts.all():
        raise UsageError(
            f"--class-weights {BALANCED} needs training images of every class, and {splits.name} has none of "
            f"'{names[int(counts.argmin())]}'; give a number for each class, or raise --max-train."
        )
    return tuple((counts.sum() / (len(names) * counts)).tolist())


def _folder(name: str, data_dir: str | None) -> str:
    kind, _, path = name.partition(":")
    return f"folder:{image_folder(path, data_dir).absolute()}" if kind == "folder" else name


_CLASSIFY = TaskRules(datasets.load, Batches, _folder, None, _logits, crops=True)


def rules_of(task: TaskName) -> TaskRules:
    """What a task decides; what reads boxes, or lists of labels, is imported for these tasks alone."""
    if task == "classify":
        return _CLASSIFY
    module = "detection" if task == "detect" else "multi_label"
    rules: TaskRules = resolve_name(f"snugfit._engine.{module}:RULES")
    return rules


def import_for(request: Request) -> None:
    """Import what strategies, network and data of a request need and others do not.

    Call it before its budget counts: code is private memory, and what is imported later takes from the budget.
    """
    with library_import():
        import_strategies(request)
        models.import_builder(request.model.model)
        if rules_of(request.data.task).crops:
            for name in (request.data.name, *data_sets_in(request.strategy).values()):
                datasets.import_reader(name)
