"""Run a trained model: on a split, for its accuracy, and on image files, for classes or boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snugfit._core.option_groups import Split
from snugfit._data import Decoder, Transform, upright_size
from snugfit._engine.images import images_at_once, run_images
from snugfit._engine.loading import Architecture, load
from snugfit._engine.tasks import rules_of
from snugfit._training.task import Classification, Detection, Score, Task, measure
from snugfit.detection import corners, detections
from snugfit.errors import DataError

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_SURE = 0.25
"""Least score of a box that is predicted; darknet's demonstrations take 0.24."""

Row = tuple[Any, ...]


def measured(
    folder: Path,
    data: str | None = None,
    data_dir: str | None = None,
    split: Split | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
) -> dict[str, Any]:
    """Measure the model of a run on a split; see :func:`snugfit.evaluate`."""
    architecture, images = Architecture.read(folder), run_images(folder, data, data_dir, split)
    score = measure(_task(architecture), load(folder, model), images.batches(), torch.device("cpu"))
    return {"data": images.name, "split": images.split, **_figures(score, architecture)}


def _task(architecture: Architecture) -> Task:
    classes = len(architecture.class_names)
    return Detection(classes, architecture.anchors, 1) if architecture.task == "detect" else Classification(classes)


def _figures(score: Score, architecture: Architecture) -> dict[str, Any]:
    per_class = dict(zip(architecture.class_names, score.per_class, strict=True))
    found = {"count": score.samples, "accuracy": score.value, "per_class": per_class}
    if architecture.task == "detect":
        return {**found, "map50": score.value}
    return {**found, "top5": score.top5, "confusion": score.confusion}


@torch.no_grad()
def predicted(
    folder: Path, images: Path, top: int | None = None, model: nn.Module | Callable[[], nn.Module] | None = None
) -> Iterator[Row]:
    """Classify images, or find the objects in them; see :func:`snugfit.predict`."""
    architecture = Architecture.read(folder)
    network, read = load(folder, model), _READERS[architecture.task]
    paths = _image_paths(images)
    channels, size = architecture.input_shape[0], architecture.input_shape[-1]
    decoder = Decoder(size - 2 * architecture.border, channels, crop=rules_of(architecture.task).crops)
    transform = Transform(architecture.mean, architecture.std, size, flip=False)
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


def _boxes(outputs: Tensor, paths: Sequence[Path], architecture: Architecture, top: int | None) -> Iterator[Row]:
    """The boxes of each image in pixels of the upright image, the surest first, from outputs (B, A * (5 + K), H, W)."""
    for path, found in zip(paths, detections(outputs, architecture.anchors, _SURE), strict=True):
        sides = torch.tensor(upright_size(path) * 2)
        places = (corners(found.boxes).clamp(0, 1) * sides).tolist()
        for score, label, place in list(zip(found.scores.tolist(), found.classes.tolist(), places, strict=True))[:top]:
            yield str(path), architecture.class_names[label], score, *place


_READERS = {"classify": _classes, "detect": _boxes}


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
    paths = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and not p.name.startswith("."))
    if not paths:
        raise DataError(f"there are no images in {path} (looked for {', '.join(_SUFFIXES)}).")
    return paths
