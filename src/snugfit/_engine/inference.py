"""Run a trained model: on a split, for its accuracy, and on image files, for classes, labels or boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snugfit import _data as datasets
from snugfit._chain import taking_one_tensor
from snugfit._core.functions import is_function
from snugfit._core.hardware import decoding_threads
from snugfit._core.option_groups import FROM_PYTHON, DataOptions, Split
from snugfit._core.options import AUTO, checked
from snugfit._core.record import PRECISIONS
from snugfit._core.request import Request
from snugfit._core.workload import TaskName
from snugfit._data import ImageSet, Transform, image_folder
from snugfit._data.decode import EXTENSIONS, NOT_READ, Decoder, upright_size
from snugfit._data.files import walk
from snugfit._data.prepared import AsIs
from snugfit._engine.loading import Architecture, ModuleOrFactory, load
from snugfit._engine.tasks import rules_of
from snugfit._storage.run_folder import read_data, read_record
from snugfit._training.task import Classification, Detection, MultiLabel, Task, measure
from snugfit.detection import corners, detections
from snugfit.errors import DataError, UsageError

_BATCH = 64
_SPLITS = ("train", "val", "test")
_MIN_SCORE = 0.25
"""Least score of a predicted box; darknet's demonstrations take 0.24."""

_LIKELY = 0.5
"""Least probability of a predicted label."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class RunImages:
    """The images of a split, normalised as in training; more than one set if the split is ``all``."""

    name: str
    split: str
    sets: tuple[ImageSet, ...]
    transform: Transform
    batch: int
    task: TaskName = "classify"

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All images, float32 (B, C, H, W), and labels (B,) or (B, classes), or boxes (B, M, 5), in stored order."""
        make = rules_of(self.task).batches
        return chain.from_iterable(make(images, self.transform).in_order(self.batch) for images in self.sets)


def run_images(
    folder: Path, data: str | None = None, data_dir: str | None = None, split: Split | None = None
) -> RunImages:
    """Open a split of a run's own data set, or of another with the same classes.

    The default split is ``test``, or ``all`` for a folder other than the run's.
    """
    architecture, request = Architecture.read(folder), read_data(Request, folder / "request.json")
    name = data or request.data.name
    if not is_function(name):
        architecture.require_files()
    own = data is None or _is_own(data, data_dir, request.data)
    chosen = checked("split", Split | None, split) or (
        "test" if own or not _is_folder(str(data), architecture.task) else "all"
    )
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
    kind = AsIs if architecture.as_is else Transform
    transform = kind(architecture.mean, architecture.std, flip=False)
    return RunImages(name, chosen, tuple(sets), transform, images_at_once(folder), architecture.task)


def images_at_once(folder: Path) -> int:
    """Images per batch: at most the batch of the final test in training."""
    phases = read_record(folder).phases if (folder / "record.json").exists() else ()
    return min(_BATCH, phases[-1].batch_size) if phases else _BATCH


def _is_folder(data: str, task: TaskName) -> bool:
    """Whether the name of data is one of a folder without splits of its own; sets of boxes have them."""
    return not is_function(data) and (task == "multi-label" or data.startswith("folder:"))


def _is_own(data: str, data_dir: str | None, options: DataOptions) -> bool:
    """Whether ``data`` is what a run was trained on, in any spelling."""
    if options.task != "classify":
        placed = rules_of(options.task).place(data, data_dir or options.data_dir)
        return placed == options.name or Path(placed).resolve() == Path(options.name).resolve()
    if not data.startswith("folder:") or not options.name.startswith("folder:"):
        return data == options.name
    named = image_folder(data.removeprefix("folder:"), data_dir or options.data_dir)
    return named.resolve() == Path(options.name.removeprefix("folder:")).resolve()


def _open(
    data: str, data_dir: str | None, split: str, own: bool, architecture: Architecture, request: Request
) -> tuple[tuple[str, ...], list[ImageSet]]:
    """Class names, and the sets of images of a split; no sets if there is no such split."""
    options, shape = request.data, architecture.input_shape
    data_dir = data_dir or options.data_dir
    if architecture.task == "classify" and split == "all" and not own and data.startswith("folder:"):
        look: dict[str, Any] = {"image_size": shape[1:], "channels": shape[0], "border": architecture.border}
        return datasets.read_folder(data.removeprefix("folder:"), **look, data_dir=data_dir, workers=options.workers)
    splits = rules_of(architecture.task).load(
        data,
        data_dir=data_dir,
        image_size=None if architecture.as_is else shape[1:],
        max_train=options.max_train if own else None,
        max_val=options.max_val if own else None,
        seed=request.training.seed,
        workers=options.workers,
    )
    if (splits.image_shape, splits.inputs) != (shape, architecture.inputs):
        raise DataError(f"{data} has items of another shape than the model was trained on. Prepare them alike.")
    if splits.as_is != architecture.as_is:
        raise DataError(f"{data} prepares images otherwise than the run's data did (as_is=True). Prepare them alike.")
    sets = [getattr(splits, name) for name in (_SPLITS if split == "all" else (split,))]
    return splits.class_names, [images for images in sets if images is not None]


def task_of_run(folder: Path) -> Task:
    """What a run's model does."""
    architecture = Architecture.read(folder)
    classes = len(architecture.class_names)
    if architecture.task == "detect":
        return Detection(classes, architecture.anchors, 1)
    return MultiLabel(classes) if architecture.task == "multi-label" else Classification(classes)


def measured(
    folder: Path,
    data: str | None = None,
    data_dir: str | None = None,
    split: Split | None = None,
    model: ModuleOrFactory | None = None,
) -> dict[str, Any]:
    """Measure the model of a run on a split; see :func:`snugfit.evaluate`."""
    architecture, images = Architecture.read(folder), run_images(folder, data, data_dir, split)
    names, task = architecture.class_names, task_of_run(folder)
    network = taking_one_tensor(load(folder, model), architecture.inputs)
    score = measure(task, network, images.batches(), torch.device("cpu"))
    per_class = dict(zip(names, score.per_class, strict=True))
    figures: dict[str, Any] = {key: score.value for key, name in PRECISIONS.items() if name == task.metric}
    figures = figures or {"top5": score.top5, "confusion": score.confusion}
    found = {"count": score.samples, "accuracy": score.value, "per_class": per_class}
    return {"data": images.name, "split": images.split, **found, **figures}


@torch.no_grad()
def predicted(
    folder: Path, images: Path, top: int | None = None, model: ModuleOrFactory | None = None
) -> Iterator[Row]:
    """Classify images, or find the objects in them; see :func:`snugfit.predict`."""
    architecture = Architecture.read(folder)
    architecture.require_files()
    network, read = load(folder, model), _READERS[architecture.task]
    paths = _image_paths(images)
    channels, height, width = architecture.input_shape
    inside = height - 2 * architecture.border, width - 2 * architecture.border
    decoder = Decoder(inside, channels, decoding_threads(AUTO), crop=rules_of(architecture.task).crops)
    transform = Transform(architecture.mean, architecture.std, flip=False)
    batch, broken = images_at_once(folder), list[DataError]()
    try:
        for start in range(0, len(paths), batch):
            chunk, decoded = _decode(paths[start : start + batch], decoder, broken)
            if decoded is None:
                continue
            decoded = nn.functional.pad(decoded, (architecture.border,) * 4)
            yield from read(network(transform(decoded)), chunk, architecture, top)
    finally:
        decoder.close()
    if broken:
        raise DataError(f"{len(broken)} of {len(paths)} images were left out. {broken[0]}")


def _classes(outputs: Tensor, paths: Sequence[Path], architecture: Architecture, top: int | None) -> Iterator[Row]:
    """The likeliest classes of each image, from logits (B, K)."""
    probabilities = outputs.softmax(1)
    values, classes = probabilities.topk(min(top or 1, probabilities.shape[1]), dim=1)
    for path, row, indices in zip(paths, values.tolist(), classes.tolist(), strict=True):
        for value, index in zip(row, indices, strict=True):
            yield str(path), architecture.class_names[index], value


def _labels(outputs: Tensor, paths: Sequence[Path], architecture: Architecture, top: int | None) -> Iterator[Row]:
    """The labels of each image that are likelier than not, or the ``top`` likeliest, from logits (B, K)."""
    values, classes = outputs.sigmoid().sort(dim=1, descending=True)
    for path, row, indices in zip(paths, values.tolist(), classes.tolist(), strict=True):
        count = sum(value >= _LIKELY for value in row) if top is None else top
        for value, index in list(zip(row, indices, strict=True))[:count]:
            yield str(path), architecture.class_names[index], value


def _boxes(outputs: Tensor, paths: Sequence[Path], architecture: Architecture, top: int | None) -> Iterator[Row]:
    """The boxes of each image in pixels of the upright image, the surest first, from outputs (B, A * (5 + K), H, W)."""
    for path, found in zip(paths, detections(outputs, architecture.anchors, _MIN_SCORE), strict=True):
        sides = torch.tensor(upright_size(path) * 2)
        places = (corners(found.boxes).clamp(0, 1) * sides).tolist()
        for score, label, place in list(zip(found.scores.tolist(), found.classes.tolist(), places, strict=True))[:top]:
            yield str(path), architecture.class_names[label], score, *place


_READERS = {"classify": _classes, "multi-label": _labels, "detect": _boxes}


def _decode(
    paths: list[Path], decoder: Callable[[list[Path]], torch.Tensor], broken: list[DataError]
) -> tuple[list[Path], torch.Tensor | None]:
    """The images of a batch that can be decoded, (B, C, H, W); the errors of the others are added to ``broken``."""
    try:
        return paths, decoder(paths)
    except DataError:
        readable, images = [], []  # one by one below, to find out which
    for path in paths:
        try:
            images.append(decoder([path]))
            readable.append(path)
        except DataError as error:
            broken.append(error)
    return readable, torch.cat(images) if images else None


def _image_paths(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise DataError(f"{path} does not exist; give an image, or a folder of images.")
    paths = sorted(walk(path, EXTENSIONS | NOT_READ, []))
    if not paths:
        raise DataError(f"there are no images in {path} (looked for {', '.join(sorted(EXTENSIONS))}).")
    return paths
