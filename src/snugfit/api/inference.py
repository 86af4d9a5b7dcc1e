"""Use a trained model: evaluate it on a split, predict a folder of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snugfit.api.images import images_at_once, run_images
from snugfit.api.loading import Architecture, load
from snugfit.data import Decoder, Transform
from snugfit.errors import DataError
from snugfit.training.loop import count_correct

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def evaluate(
    run: str | Path,
    data: str | None = None,
    data_dir: str | None = None,
    split: str | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
) -> dict[str, Any]:
    """Measure a trained model on a split of its own data set, or of another with the same classes.

    Args:
        run: run folder.
        data, data_dir: data set; the one of the run by default.
        split: ``train``, ``val``, ``test`` or ``all``; ``test``, but ``all`` of another folder than the run's.
        model: the module that was trained, where it was passed from Python.

    Returns:
        ``split``, ``accuracy`` and ``top5`` in [0, 1], ``count``, ``per_class`` accuracies by name, ``confusion``.

    Raises:
        DataError: the data has no such split, or other classes.
    """
    folder = Path(run)
    class_names, images = Architecture.read(folder).class_names, run_images(folder, data, data_dir, split)
    confusion, among_five = count_correct(load(folder, model), images.batches(), len(class_names), torch.device("cpu"))
    totals, count = confusion.sum(1).clamp(min=1), int(confusion.sum())
    return {
        "data": images.name,
        "split": images.split,
        "count": count,
        "accuracy": float(confusion.trace()) / max(count, 1),
        "top5": among_five / max(count, 1),
        "per_class": dict(zip(class_names, (confusion.diagonal() / totals).tolist(), strict=True)),
        "confusion": confusion.tolist(),
    }


@torch.no_grad()
def predict(
    run: str | Path, images: str | Path, top: int = 1, model: nn.Module | Callable[[], nn.Module] | None = None
) -> Iterator[tuple[str, str, float]]:
    """Classify an image, or every image below a folder.

    Args:
        run: run folder.
        images: file or folder.
        top: how many classes to give for each image.
        model: the module that was trained, where it was passed from Python.

    Yields:
        Path, class name and probability; ``top`` rows per image.

    Raises:
        DataError: there are no images; or, once all others are classified, some cannot be decoded.
    """
    folder = Path(run)
    architecture = Architecture.read(folder)
    network = load(folder, model)
    paths = _image_paths(Path(images))
    channels, size = architecture.input_shape[0], architecture.input_shape[-1]
    decoder = Decoder(size - 2 * architecture.border, channels)
    transform = Transform(architecture.mean, architecture.std, size, flip=False)
    batch, broken = images_at_once(folder), list[DataError]()
    try:
        for start in range(0, len(paths), batch):
            chunk, decoded = _decode(paths[start : start + batch], decoder, broken)
            if decoded is None:
                continue
            decoded = nn.functional.pad(decoded, (architecture.border,) * 4)
            probabilities = network(transform(decoded)).softmax(1)
            values, classes = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
            for path, row, indices in zip(chunk, values.tolist(), classes.tolist(), strict=True):
                for value, index in zip(row, indices, strict=True):
                    yield str(path), architecture.class_names[index], value
    finally:
        decoder.close()
    if broken:
        raise DataError(f"{len(broken)} of {len(paths)} images were left out. {broken[0]}")


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
