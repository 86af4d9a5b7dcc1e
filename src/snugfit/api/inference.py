"""Use a trained model: evaluate it on a split, predict a folder of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snugfit import data as datasets
from snugfit.api.loading import Architecture, load, read_data
from snugfit.core.record import Record
from snugfit.core.request import OWN, DataOptions, Request
from snugfit.data import Batches, Decoder, ImageSet, Transform, image_folder
from snugfit.errors import DataError, UsageError
from snugfit.training.loop import count_correct

_BATCH = 64
_SPLITS = ("train", "val", "test")
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
    architecture, request = Architecture.read(folder), read_data(Request, folder / "request.json")
    own = data is None or _is_own(data, data_dir, request.data)
    split = split or ("test" if own or not str(data).startswith("folder:") else "all")
    if split not in (*_SPLITS, "all"):
        raise UsageError(f"'{split}' is not a split; use {', '.join(_SPLITS)} or all.")
    name = data or request.data.data
    if name == OWN:
        raise UsageError("this run trained on data of your own; name a data set or folder:PATH with --data.")
    class_names, sets = _images(name, data_dir, split, own, architecture, request)
    if class_names != architecture.class_names:
        raise DataError(f"{name} has other classes than the model of {folder}: {', '.join(class_names)}.")
    if not sets:
        raise DataError(f"{name} has no {split} split.")
    transform = Transform(architecture.mean, architecture.std, architecture.input_shape[-1], flip=False)
    classes, size = len(class_names), _test_batch(folder)
    batches = chain.from_iterable(Batches(images, transform).in_order(size) for images in sets)
    confusion, among_five = count_correct(load(folder, model), batches, classes, torch.device("cpu"))
    totals, count = confusion.sum(1).clamp(min=1), int(confusion.sum())
    return {
        "data": name,
        "split": split,
        "count": count,
        "accuracy": float(confusion.trace()) / max(count, 1),
        "top5": among_five / max(count, 1),
        "per_class": dict(zip(architecture.class_names, (confusion.diagonal() / totals).tolist(), strict=True)),
        "confusion": confusion.tolist(),
    }


def _is_own(data: str, data_dir: str | None, options: DataOptions) -> bool:
    """Whether ``data`` is what a run was trained on, however it is written."""
    if not data.startswith("folder:") or not options.data.startswith("folder:"):
        return data == options.data
    named = image_folder(data.removeprefix("folder:"), data_dir or options.data_dir)
    return named.resolve() == Path(options.data.removeprefix("folder:")).resolve()


def _images(
    data: str, data_dir: str | None, split: str, own: bool, architecture: Architecture, request: Request
) -> tuple[tuple[str, ...], list[ImageSet]]:
    """Class names, and the sets of images to measure; none where there is no such split."""
    options, shape = request.data, architecture.input_shape
    data_dir = data_dir or options.data_dir
    if split == "all" and not own and data.startswith("folder:"):
        return datasets.read_folder(
            data.removeprefix("folder:"), image_size=shape[-1], channels=shape[0], border=architecture.border,
            data_dir=data_dir, workers=options.workers,
        )  # fmt: skip
    splits = datasets.load(
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
    batch, broken = _test_batch(folder), list[DataError]()
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


def _test_batch(folder: Path) -> int:
    """Images at once: no more than were tested at once when the model was trained."""
    record = folder / "record.json"
    phases = read_data(Record, record).phases if record.exists() else ()
    return min(_BATCH, phases[-1].batch_size) if phases else _BATCH


def _image_paths(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    paths = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and not p.name.startswith("."))
    if not paths:
        raise DataError(f"there are no images in {path} (looked for {', '.join(_SUFFIXES)}).")
    return paths
