"""A user's own ``torch.utils.data.Dataset`` as splits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Subset as TorchSubset
from torch.utils.data import TensorDataset

from snugfit.data.decode import reading, square
from snugfit.data.sets import Parts, Splits, check_class_count, check_labels, resized
from snugfit.data.split import assemble
from snugfit.errors import DataError

_GREY_MODES = ("1", "L", "I", "I;16", "F")


class DatasetImages:
    """Images of a map-style data set, read one by one in the caller's thread.

    Args:
        dataset: yields (image, label); the image is float in [0, 1] or uint8, (C, H, W), or a PIL image.
        labels: (N,) int64.
        channels, size: what every image must have.
        resize: bring images of another size to ``size`` instead of refusing them.
    """

    def __init__(self, dataset: Any, labels: np.ndarray, channels: int, size: int, resize: bool) -> None:
        self._dataset, self.labels = dataset, labels
        self._channels, self._size, self._resize = channels, size, resize

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> uint8 (B, C, H, W)."""
        batch = torch.empty((len(indices), self._channels, self._size, self._size), dtype=torch.uint8)
        for row, index in enumerate(indices):
            batch[row] = self._image(int(index))
        return batch

    def _image(self, index: int) -> torch.Tensor:
        image, _ = _sample(self._dataset, index)
        if isinstance(image, Image.Image):
            return _from_pil(image, index, self._channels, self._size)
        image = _as_bytes(image, index)
        if image.shape[0] != self._channels:
            raise DataError(f"image {index} has {image.shape[0]} channel(s), but the first has {self._channels}.")
        if not self._resize and image.shape[1:] != (self._size, self._size):
            raise DataError(
                f"image {index} is {tuple(image.shape[1:])} pixels, but the first is {(self._size, self._size)}. "
                "Give image_size to resize them all."
            )
        return resized(image[None], self._size)[0]


def from_dataset(
    train: Any,
    val: Any = None,
    test: Any = None,
    *,
    class_names: Sequence[str] | None = None,
    name: str = "dataset",
    image_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    flip: bool = False,
    classes: int | None = None,
    max_train: int | None = None,
    max_val: int | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
) -> Splits:
    """Use map-style data sets of (image, label).

    Images are float tensors in [0, 1] or uint8 tensors, (C, H, W), or PIL images; they are normalised later, with
    ``mean`` and ``std`` (0.5 by default). Labels come from ``targets`` or ``labels`` where a data set has them;
    otherwise every item is read once. Splits that are missing are made from ``train`` as in :func:`snugfit.data.load`.

    Raises:
        DataError: an image or label cannot be used; the message names its index.
    """
    given = {key: dataset for key, dataset in (("train", train), ("val", val), ("test", test)) if dataset is not None}
    labels = {key: labels_of(dataset, key) for key, dataset in given.items()}
    count = len(class_names) if class_names else max(int(values.max()) for values in labels.values()) + 1
    check_class_count(count, "the data set")
    if count < 2:
        raise DataError("the data set has only one class; at least two are needed.")
    for key, values in labels.items():
        check_labels(values, count, f"the {key} data set")
    channels, size = _shape(_sample(train, 0)[0], image_size)
    sets = {k: DatasetImages(d, labels[k], channels, size, image_size is not None) for k, d in given.items()}
    names = tuple(class_names or (str(label) for label in range(count)))
    return assemble(
        name, Parts(names, sets["train"], sets.get("val"), sets.get("test")),
        image_shape=(channels, size, size), mean=tuple(mean or (0.5,) * channels), std=tuple(std or (0.5,) * channels),
        flip=flip, classes=classes, max_train=max_train, max_val=max_val, val_fraction=val_fraction, seed=seed,
    )  # fmt: skip


def labels_of(dataset: Any, name: str = "train") -> np.ndarray:
    """Labels of a map-style data set, (N,) int64, without reading images where that is possible.

    Raises:
        DataError: the data set is empty or a label is not an integer.
    """
    if not len(dataset):
        raise DataError(f"the {name} data set is empty.")
    if isinstance(dataset, TorchSubset):
        inner: np.ndarray = labels_of(dataset.dataset, name)
        return np.asarray(inner[np.asarray(dataset.indices)])
    listed = _listed_labels(dataset)
    if listed is None:
        listed = [_sample(dataset, index)[1] for index in range(len(dataset))]
    try:
        return np.fromiter((operator.index(label) for label in listed), np.int64, len(dataset))
    except (TypeError, ValueError) as error:
        raise DataError(f"the labels of the {name} data set are not one integer per image: {error}.") from error


def _listed_labels(dataset: Any) -> Any:
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    return next((found for key in ("targets", "labels") if (found := getattr(dataset, key, None)) is not None), None)


def _sample(dataset: Any, index: int) -> tuple[Any, Any]:
    try:
        item = dataset[index]
    except OSError as error:
        raise DataError(f"image {index} of the data set cannot be read: {error}. Replace or remove it.") from error
    try:
        image, label = item
    except (TypeError, ValueError) as error:
        raise DataError(f"item {index} of the data set is not a pair (image, label): {error}.") from error
    return image, label


def _shape(image: Any, image_size: int | None) -> tuple[int, int]:
    if isinstance(image, Image.Image):
        return (1 if image.mode in _GREY_MODES else 3), image_size or min(image.size)
    channels, height, width = _as_bytes(image, 0).shape
    if image_size is None and height != width:
        raise DataError(
            f"image 0 is {height}x{width} pixels, but images must be square. Give image_size to resize them."
        )
    return channels, image_size or height


def _from_pil(image: Image.Image, index: int, channels: int, size: int) -> torch.Tensor:
    if (channels == 1) != (image.mode in _GREY_MODES):
        raise DataError(f"image {index} has mode {image.mode}, but the first has {channels} channel(s).")
    with reading(f"image {index} of the data set", "Replace or remove it."):
        pixels = np.array(square(image, size, channels))
    return torch.from_numpy(pixels.reshape(size, size, channels)).permute(2, 0, 1)


def _as_bytes(image: Any, index: int) -> torch.Tensor:
    if not isinstance(image, torch.Tensor):
        raise DataError(f"image {index} is a {type(image).__name__}, not a tensor or PIL image.")
    if image.ndim != 3 or (image.shape[0] > 4 and image.shape[-1] <= 4):
        raise DataError(
            f"image {index} has shape {tuple(image.shape)}; images are tensors of (channels, height, width)."
        )
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point() or not (image.amin() >= 0 and image.amax() <= 1):
        raise DataError(
            f"image {index} is neither uint8 nor float in [0, 1]. Leave normalisation to snugfit: give mean and std."
        )
    return (image * 255).round().to(torch.uint8)
