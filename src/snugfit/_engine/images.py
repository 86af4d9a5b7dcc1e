"""The images to use a trained model on: those of its own run, or of another data set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch import Tensor

from snugfit import _data as datasets
from snugfit._core.option_groups import FROM_PYTHON, DataOptions, Split
from snugfit._core.options import checked
from snugfit._core.request import Request
from snugfit._core.workload import TaskName
from snugfit._data import ImageSet, Transform, boxed_path, image_folder
from snugfit._engine.loading import Architecture
from snugfit._engine.tasks import rules_of
from snugfit._storage.run_folder import read_data, read_record
from snugfit.errors import DataError, UsageError

_BATCH = 64
_SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class RunImages:
    """Images with the normalisation of a run.

    Attributes:
        name, split: data set and split.
        sets: the images; more than one set if the split is ``all``.
        transform: normalises as in training, and does not augment.
        batch: images per batch.
        task: what the model has learned.
    """

    name: str
    split: str
    sets: tuple[ImageSet, ...]
    transform: Transform
    batch: int
    task: TaskName = "classify"

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All images, float32 (B, C, H, W), and labels (B,), or boxes (B, M, 5), in stored order."""
        make = rules_of(self.task).batches
        return chain.from_iterable(make(images, self.transform).in_order(self.batch) for images in self.sets)


def run_images(
    folder: Path, data: str | None = None, data_dir: str | None = None, split: Split | None = None
) -> RunImages:
    """Open a split of a run's own data set, or of another with the same classes.

    Args:
        folder: run folder.
        data, data_dir: data set; the one of the run by default.
        split: ``train``, ``val``, ``test`` or ``all``; default ``test``, or ``all`` for a folder other than the run's.

    Raises:
        UsageError: there is no such split, or the data was passed from Python.
        DataError: the data is missing, has no such split, or other classes.
    """
    architecture, request = Architecture.read(folder), read_data(Request, folder / "request.json")
    own = data is None or _is_own(data, data_dir, request.data)
    chosen = checked("split", Split | None, split) or ("test" if own or not str(data).startswith("folder:") else "all")
    name = data or request.data.data
    if name == FROM_PYTHON:
        raise UsageError("this run trained on data of your own; name a data set or folder:PATH with --data.")
    class_names, sets = _open(name, data_dir, chosen, own, architecture, request)
    if not sets and split is None and architecture.task == "detect":
        chosen = "val"  # sets of boxes seldom have a test part
        class_names, sets = _open(name, data_dir, chosen, own, architecture, request)
    if class_names != architecture.class_names:
        raise DataError(f"{name} has other classes than the model of {folder}: {', '.join(class_names)}.")
    if not sets:
        raise DataError(f"{name} has no {chosen} split.")
    transform = Transform(architecture.mean, architecture.std, architecture.input_shape[-1], flip=False)
    return RunImages(name, chosen, tuple(sets), transform, images_at_once(folder), architecture.task)


def images_at_once(folder: Path) -> int:
    """Images per batch: at most the batch of the final test in training."""
    phases = read_record(folder).phases if (folder / "record.json").exists() else ()
    return min(_BATCH, phases[-1].batch_size) if phases else _BATCH


def _is_own(data: str, data_dir: str | None, options: DataOptions) -> bool:
    """Whether ``data`` is what a run was trained on, in any spelling."""
    if options.task == "detect":
        return boxed_path(data, data_dir or options.data_dir).resolve() == Path(options.data).resolve()
    if not data.startswith("folder:") or not options.data.startswith("folder:"):
        return data == options.data
    named = image_folder(data.removeprefix("folder:"), data_dir or options.data_dir)
    return named.resolve() == Path(options.data.removeprefix("folder:")).resolve()


def _open(
    data: str, data_dir: str | None, split: str, own: bool, architecture: Architecture, request: Request
) -> tuple[tuple[str, ...], list[ImageSet]]:
    """Class names, and the sets of images of a split; no sets if there is no such split."""
    options, shape = request.data, architecture.input_shape
    data_dir = data_dir or options.data_dir
    if architecture.task == "classify" and split == "all" and not own and data.startswith("folder:"):
        look = {"image_size": shape[-1], "channels": shape[0], "border": architecture.border}
        return datasets.read_folder(data.removeprefix("folder:"), **look, data_dir=data_dir, workers=options.workers)
    splits = rules_of(architecture.task).load(
        data,
        data_dir=data_dir,
        image_size=shape[-1],
        max_train=options.max_train if own else None,
        max_val=options.max_val if own else None,
        seed=request.training.seed,
        workers=options.workers,
    )
    sets = [getattr(splits, name) for name in (_SPLITS if split == "all" else (split,))]
    return splits.class_names, [images for images in sets if images is not None]
