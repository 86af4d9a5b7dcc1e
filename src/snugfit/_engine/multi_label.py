"""What several labels per image decide: how files are read, and what a model must output."""

from __future__ import annotations

from typing import Any

from snugfit._chain import Chain
from snugfit._core.functions import is_function
from snugfit._core.request import Request
from snugfit._data import Batches, Splits
from snugfit._data.labels_file import labels_path, load_labelled
from snugfit._engine.tasks import TaskRules, loss_facts, require_logits
from snugfit.errors import UsageError


def _facts(request: Request, chain: Chain, splits: Splits) -> dict[str, Any]:
    training = request.training
    if splits.train.has_boxes or not splits.train.has_several_labels:
        raise UsageError(
            f"{splits.name} has one class for each image; --task multi-label takes vectors with a 0 or 1 for each "
            "class, or a folder with a labels.csv. Leave out --task to classify."
        )
    if training.class_weights is not None:
        raise UsageError(
            f"--class-weights {training.class_weights} weights images of one class; leave it out with several labels, "
            "or weight them by a loss from Python: loss=torch.nn.BCEWithLogitsLoss(pos_weight=...)."
        )
    if training.label_smoothing:
        raise UsageError(
            f"--label-smoothing {training.label_smoothing:g} spreads one class over all; leave it out with several "
            "labels."
        )
    require_logits(request, chain, splits)
    return {"task": "multi-label", **loss_facts(training)}


def _place(name: str, data_dir: str | None) -> str:
    return name if is_function(name) else str(labels_path(name, data_dir).absolute())


RULES = TaskRules(load_labelled, Batches, _place, None, _facts, crops=True)
