"""A user's own ``torch.utils.data.Dataset`` as splits."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate
from torch.utils.data import Subset as TorchSubset

from snugfit._core.amounts import Sides, height_and_width
from snugfit._core.functions import attempt
from snugfit._core.inputs import packed_shape
from snugfit._core.keywords import DatasetKeywords, with_keywords
from snugfit._core.options import from_keywords
from snugfit._data.decode import fitted, reading
from snugfit._data.multi_label import is_vector, label_vectors
from snugfit._data.prepared import PackedInputs, PreparedImages, inputs_of, prepared_shape, takes_several
from snugfit._data.sets import ImageSet, Parts, Splits, check_class_count, check_labels, resized
from snugfit._data.split import SplitOptions, assemble
from snugfit.errors import DataError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LOOKED_AT = 8
_ROUNDING = 0.01
_IMAGES, _LABELS = ("image", "pixel_values", "img"), ("label", "labels")
_GREY_MODES = ("1", "L", "I", "I;16", "F")


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of every channel, (C, 1, 1), that images were normalised with."""

    mean: torch.Tensor
    std: torch.Tensor

    def undone(self, image: torch.Tensor) -> torch.Tensor:
        """The image (C, H, W) before normalisation, in [0, 1] except for rounding."""
        return image.float() * self.std + self.mean


@dataclass(eq=False)
class DatasetImages(ImageSet):
    """Images of a map-style data set, read one by one in the caller's thread.

    Attributes:
        dataset: yields (image, label); the image is float in [0, 1] or uint8, (C, H, W), or a PIL image.
        labels: (N,) int64, or (N, classes) uint8.
        size: height and width.
        resize: bring images of another size to ``size`` instead of refusing them.
        normalisation: of float images, which is undone.
    """

    dataset: Any
    labels: np.ndarray
    channels: int
    size: tuple[int, int]
    resize: bool
    normalisation: Normalisation | None
    runs_own_code = True

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> uint8 (B, C, H, W)."""
        batch = torch.empty((len(indices), self.channels, *self.size), dtype=torch.uint8)
        for row, index in enumerate(indices):
            batch[row] = self._image(int(index))
        return batch

    def _image(self, index: int) -> torch.Tensor:
        image, _ = _sample(self.dataset, index)
        if isinstance(image, Image.Image):
            return _from_pil(image, index, self.channels, self.size)
        image = _checked_tensor(image, index)
        if image.shape[0] != self.channels:
            raise DataError(f"image {index} has {image.shape[0]} channel(s), but the first has {self.channels}.")
        if not self.resize and image.shape[1:] != self.size:
            raise DataError(
                f"image {index} is {tuple(image.shape[1:])} pixels, but the first is {self.size}. "
                "Give image_size to resize them all."
            )
        return resized(_as_bytes(image, index, self.normalisation)[None], self.size)[0]


@dataclass(frozen=True)
class DatasetOptions(SplitOptions):
    """How data sets of the caller's are used.

    Attributes:
        class_names: names by label; the labels themselves by default.
        name: of the data set, for reports.
        mean, std: normalisation of images in [0, 1], per channel; 0.5 by default.
        flip: whether a mirrored image keeps its class.
        as_is: use float tensors of any size as the data set gives them.
        inputs: keys of the network's inputs, if items are dictionaries with several.
    """

    class_names: Sequence[str] | None = None
    name: str = "dataset"
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    flip: bool = False
    as_is: bool = False
    inputs: Sequence[str] = ()


def from_dataset(train: Any, val: Any = None, test: Any = None, **options: Unpack[DatasetKeywords]) -> Splits:
    """Use map-style data sets of (image, label).

    >>> import snugfit, torch
    >>> images = [(torch.rand(3, 8, 8), label % 2) for label in range(40)]
    >>> splits = snugfit.from_dataset(images[:30], images[30:], mean=(0.5,) * 3, std=(0.2,) * 3)
    >>> len(splits.train), len(splits.val), splits.image_shape
    (30, 10, (3, 8, 8))

    Images are float tensors in [0, 1] or uint8 tensors, (C, H, W), or PIL images; they are normalised later, with
    ``mean`` and ``std`` (0.5 by default). Float images that were normalised already are converted back to 8 bits a
    channel: give the ``mean`` and ``std`` that they were normalised with. Or say ``as_is=True``, which uses float
    tensors of one shape, square or not, exactly as the data set gives them, and augments nothing.

    Items are pairs, or dictionaries with ``image``, ``pixel_values`` or ``img``, and ``label`` or ``labels``. Of a
    DataLoader the data set is used.

    A network of several inputs takes items ``((a, b), label)``, ``({"a": a, "b": b}, label)``, or dictionaries whose
    keys ``inputs`` names; those of dictionaries are keywords of its forward pass. Inputs are tensors, arrays or numbers
    of one shape and type each, which are used as they are; floats become float32.

    A label is the number of a class, or a vector with a 0 or 1 for each class, if an image may have several or none;
    a network then ends in a logit for each class, and is trained by binary cross entropy (``--task multi-label``).
    Labels come from ``targets`` or ``labels`` if a data set has them, and a few items have the same; otherwise every
    item is read once. Splits that are missing are made from ``train``: ``val_fraction`` of its images each, stratified
    and determined by ``seed``.

    Args:
        train, val, test: map-style data sets.
        **options: ``mean``, ``std``: normalisation per channel; ``class_names``: names by label; ``name``: of the data
            set, for reports; ``flip``: whether a mirrored image keeps its class; ``image_size``: side in pixels, or
            height and width, to which images are resized; ``as_is``, ``inputs``: see above; ``classes``: expected
            number; ``max_train``, ``max_val``: limits of images; ``val_fraction`` (0.1) and ``seed`` (0): of the
            division.

    Raises:
        UnknownNameError: there is no such option.
        UsageError: a data set is not map-style, or ``mean`` or ``std`` is invalid.
        DataError: an image or label cannot be used; the message names its index.
    """
    chosen = from_keywords(DatasetOptions, options)
    chosen = replace(chosen, mean=_numbers("mean", chosen.mean), std=_numbers("std", chosen.std))
    sources = {"train": train, "val": val, "test": test}
    given = {key: _map_style(dataset, key) for key, dataset in sources.items() if dataset is not None}
    keys = _keys(chosen.inputs)
    labels = {key: labels_of(dataset, key, keys) for key, dataset in given.items()}
    names = _class_names(labels, chosen.class_names)
    notes = _loader_notes(sources)
    first = _sample(given["train"], 0, keys)[0]
    if chosen.as_is or takes_several(first):
        return replace(_prepared(given, first, labels, names, chosen), notes=notes)
    channels, size = _shape(first, chosen.sides)
    sets = _as_images(given, labels, (channels, size), chosen)
    mean, std = (tuple(values or (0.5,) * channels) for values in (chosen.mean, chosen.std))
    parts = Parts(names, sets["train"], sets.get("val"), sets.get("test"))
    shape = (channels, *size)
    found = assemble(chosen.name, parts, chosen, image_shape=shape, mean=mean, std=std, flip=chosen.flip)
    return replace(found, notes=notes)


vars(from_dataset)["__signature__"] = with_keywords(from_dataset, vars(DatasetOptions()))


def _as_images(
    given: Mapping[str, Any],
    labels: Mapping[str, np.ndarray],
    shape: tuple[int, tuple[int, int]],
    chosen: DatasetOptions,
) -> dict[str, DatasetImages]:
    """Data sets as images of so many channels, and height and width; ``labels`` are (N, ...) each."""
    (channels, size), resize = shape, chosen.sides is not None
    normalised = _normalisation(chosen.mean, chosen.std, channels)
    return {
        key: DatasetImages(
            dataset, labels[key], channels, size, resize, normalised if normalised and _is_normalised(dataset) else None
        )
        for key, dataset in given.items()
    }


def _loader_notes(sources: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"the {key} data is a DataLoader: its data set is used, in batches of --batch-size"
        for key, dataset in sources.items()
        if isinstance(dataset, DataLoader)
    )


def _prepared(
    given: dict[str, Any], first: Any, labels: dict[str, np.ndarray], names: tuple[str, ...], chosen: DatasetOptions
) -> Splits:
    """Splits of images, or of several inputs, that are used as they are; ``labels`` are (N, ...) each."""
    several = takes_several(first)
    for option in ("image_size", "mean", "std", "flip"):
        if getattr(chosen, option):
            what = "several inputs are used as they are" if several else "as_is=True uses images as they are"
            raise UsageError(f"{what}; leave out {option}{'' if several else ', or as_is'}.")
    inputs = inputs_of(first, 0) if several else ()
    shape = packed_shape(inputs) if several else prepared_shape(first, 0)
    sets: dict[str, ImageSet] = {}
    for key, dataset in given.items():
        sample = partial(_sample, dataset, keys=tuple(chosen.inputs))
        sets[key] = PackedInputs(sample, labels[key], inputs) if several else PreparedImages(sample, labels[key], shape)
    parts = Parts(names, sets["train"], sets.get("val"), sets.get("test"))
    mean, std = (0.0,) * shape[0], (1.0,) * shape[0]
    found = assemble(chosen.name, parts, chosen, image_shape=shape, mean=mean, std=std, flip=False)
    return replace(found, as_is=True, inputs=inputs)


def _keys(inputs: Sequence[str]) -> tuple[str, ...]:
    """Keys of a network's inputs as given: none, or several."""
    keys = () if isinstance(inputs, str) else tuple(inputs)
    if inputs and (len(set(keys)) < max(2, len(keys)) or not all(isinstance(key, str) and key for key in keys)):
        raise UsageError(f"inputs= must name at least two different keys, like ('image', 'age'), not {inputs!r}.")
    return keys


def _class_names(labels: dict[str, np.ndarray], named: Sequence[str] | None) -> tuple[str, ...]:
    """Names by label; there is one for every label in ``labels``, each (N,) int64, or (N, classes) uint8."""
    if any(values.ndim > 1 for values in labels.values()):
        return _names_of_vectors(labels, named)
    count = len(named) if named else max(int(values.max()) for values in labels.values()) + 1
    check_class_count(count, "the data set")
    if count < 2:
        raise DataError("the data set has only one class; at least two are needed.")
    for key, values in labels.items():
        check_labels(values, count, f"the {key} data set", "Number the classes from 0.")
    return tuple(named or (str(label) for label in range(count)))


def _names_of_vectors(labels: dict[str, np.ndarray], named: Sequence[str] | None) -> tuple[str, ...]:
    """Names by place in the vectors of ``labels``, each (N, classes) uint8."""
    shapes = {key: values.shape[1:] for key, values in labels.items()}
    (count, *_), *others = shapes["train"] or (0,), *shapes.values()
    if any(shape != (count,) for shape in others):
        known = ", ".join(
            f"{key} {'vectors of ' + str(*shape) if shape else 'integers'}" for key, shape in shapes.items()
        )
        raise DataError(f"the splits have different labels: {known}. Give vectors of one length, or integers, in all.")
    check_class_count(count, "the data set")
    if named and len(named) != count:
        raise DataError(f"there are {len(named)} class names, but labels are vectors of {count}; give one for each.")
    return tuple(named or map(str, range(count)))


def _map_style(dataset: Any, name: str) -> Any:
    """A map-style data set, or that of a DataLoader whose batches are no others than those of snugfit."""
    if isinstance(dataset, DataLoader):
        if not _is_plain(dataset):
            raise UsageError(
                f"the {name} data is a DataLoader with its own sampler or collate_fn, but snugfit makes the batches "
                "itself. Give its data set, loader.dataset, and the batch size as batch_size=."
            )
        dataset = dataset.dataset
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"the {name} data is a {type(dataset).__name__}, which has no length or no items by number. Give a "
            "map-style Dataset of (image, label)."
        )
    return dataset


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader gives every item once, in order or shuffled, in batches of torch's own making."""
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) is not BatchSampler or batches.sampler is not sampler or loader.collate_fn is not default_collate:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return type(sampler) is SequentialSampler


def _numbers(name: str, given: Any) -> Sequence[float] | None:
    """Numbers of a sequence, or of a tensor or array (C,); raises UsageError for anything else."""
    try:
        return None if given is None else tuple(float(each) for each in given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} has a number for each channel, like (0.5, 0.5, 0.5), not {given}.") from error


def _normalisation(mean: Sequence[float] | None, std: Sequence[float] | None, channels: int) -> Normalisation | None:
    """Mean and standard deviation as given; None if they are not."""
    if mean is None and std is None:
        return None
    if mean is None or std is None or not len(mean) == len(std) == channels:
        raise UsageError(
            f"give mean and std with a number for each of the {channels} channel(s), not {mean} and {std}."
        )
    if not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
        raise UsageError(f"mean must be finite and std above 0, not {mean} and {std}.")
    return Normalisation(*(torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (mean, std)))


def _is_normalised(dataset: Any) -> bool:
    """Whether one of a few float images has values outside [0, 1]."""
    for index in np.linspace(0, len(dataset) - 1, _LOOKED_AT, dtype=int).tolist():
        image = _sample(dataset, index)[0]
        if isinstance(image, torch.Tensor) and image.is_floating_point() and not _within(image, 0):
            return True
    return False


def _within(image: torch.Tensor, slack: float) -> bool:
    return image.numel() == 0 or bool(image.amin() >= -slack and image.amax() <= 1 + slack)


def labels_of(dataset: Any, name: str = "train", keys: tuple[str, ...] = ()) -> np.ndarray:
    """Labels of a map-style data set, (N,) int64, or (N, classes) uint8 if each is a vector of 0 and 1.

    Images are not read if that is possible; ``keys`` are those of inputs.

    Raises:
        DataError: the data set is empty, or a label is neither an integer nor such a vector, unlike others.
    """
    if not len(dataset):
        raise DataError(f"the {name} data set is empty.")
    if isinstance(dataset, TorchSubset):
        inner: np.ndarray = labels_of(dataset.dataset, name, keys)
        return np.asarray(inner[np.asarray(dataset.indices)])
    listed = _listed_labels(dataset)
    if not _are_those_of_items(listed, dataset, keys):
        listed = [_sample(dataset, index, keys)[1] for index in range(len(dataset))]
    if is_vector(next(iter(listed))):
        return label_vectors(listed, len(dataset), name)
    try:
        return np.fromiter((operator.index(label) for label in listed), np.int64, len(dataset))
    except (TypeError, ValueError) as error:
        raise DataError(f"the labels of the {name} data set are not one integer per image: {error}.") from error


def _listed_labels(dataset: Any) -> Any:
    """The labels that a data set lists, in order; empty if it lists none."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1]
    if getattr(dataset, "target_transform", None) is not None:
        return ()
    found = next((found for key in ("targets", "labels") if (found := getattr(dataset, key, None)) is not None), ())
    if isinstance(found, (torch.Tensor, np.ndarray)):
        return found
    return () if isinstance(found, Mapping) or not isinstance(found, Iterable) else list(found)


def _are_those_of_items(listed: Any, dataset: Any, keys: tuple[str, ...]) -> bool:
    """Whether labels are one for each item, and those of a few readable items: others may be relabelled."""
    if len(listed) != len(dataset):
        return False
    for index in np.linspace(0, len(dataset) - 1, _LOOKED_AT, dtype=int).tolist():
        with suppress(DataError):
            if not np.array_equal(listed[index], _sample(dataset, index, keys)[1]):
                return False
    return True


def _sample(dataset: Any, index: int, keys: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Image, or inputs of these keys, and label of an item; an error of the data set's own code names the item."""
    item = attempt(f"item {index} of the data set", lambda: dataset[index], DataError)
    if isinstance(item, Mapping):
        inputs = {key: _value(item, (key,), index) for key in keys}
        return inputs or _value(item, _IMAGES, index), _value(item, _LABELS, index)
    if keys:
        raise DataError(f"item {index} of the data set is no dictionary, whose keys inputs= names; leave out inputs=.")
    try:
        image, label = item
    except (TypeError, ValueError) as error:
        raise DataError(
            f"item {index} of the data set is not a pair (image, label): {error}. Several inputs are written "
            "((a, b), label)."
        ) from error
    return image, label


def _value(item: Mapping[str, Any], names: tuple[str, ...], index: int) -> Any:
    """The value of the first of some names that an item has."""
    for name in names:
        if name in item:
            return item[name]
    known = ", ".join(map(str, item))
    raise DataError(
        f"item {index} of the data set has {known}, but none of {', '.join(names)}. Rename it; or name the keys of "
        "several inputs: snugfit.from_dataset(..., inputs=(...))."
    )


def _shape(image: Any, image_size: Sides | None) -> tuple[int, tuple[int, int]]:
    """Channels of an image, and height and width of those that are made of it."""
    if isinstance(image, Image.Image):
        return (1 if image.mode in _GREY_MODES else 3), height_and_width(image_size or min(image.size))
    channels, height, width = _checked_tensor(image, 0).shape
    if image_size is None and height != width:
        raise DataError(
            f"image 0 is {height}x{width} pixels, but images must be square. Give image_size to resize them, or take "
            "float tensors as they are: data=snugfit.from_dataset(train, val, test, as_is=True)."
        )
    return channels, height_and_width(image_size or height)


def _from_pil(image: Image.Image, index: int, channels: int, size: tuple[int, int]) -> torch.Tensor:
    if (channels == 1) != (image.mode in _GREY_MODES):
        raise DataError(f"image {index} has mode {image.mode}, but the first has {channels} channel(s).")
    with reading(f"image {index} of the data set", "Replace or remove it."):
        pixels = np.array(fitted(image, size, channels))
    return torch.from_numpy(pixels.reshape(*size, channels)).permute(2, 0, 1)


def _checked_tensor(image: Any, index: int) -> torch.Tensor:
    """Check that an image is a tensor (C, H, W)."""
    if not isinstance(image, torch.Tensor):
        raise DataError(f"image {index} is a {type(image).__name__}, not a tensor or PIL image.")
    if image.ndim != 3 or not image.numel() or (image.shape[0] > 4 and image.shape[-1] <= 4):
        raise DataError(
            f"image {index} has shape {tuple(image.shape)}; images are tensors of (channels, height, width)."
        )
    return image


def _as_bytes(image: torch.Tensor, index: int, normalisation: Normalisation | None) -> torch.Tensor:
    if image.dtype == torch.uint8:
        return image
    if not image.is_floating_point():
        raise DataError(f"image {index} is of {image.dtype}; images are uint8, or float in [0, 1].")
    if not image.isfinite().all():
        raise DataError(f"image {index} holds NaN or infinite values. Replace or remove it.")
    low, high = float(image.amin()), float(image.amax())
    plain = image if normalisation is None else normalisation.undone(image)
    if not _within(plain, 0 if normalisation is None else _ROUNDING):
        undone = "" if normalisation is None else ", also with mean and std undone"
        raise DataError(
            f"image {index} holds values from {low:.3g} to {high:.3g}, not 0 to 1{undone}. Leave out Normalize, or\n"
            "give data=snugfit.from_dataset(train, val, test, mean=..., std=...) with its normalisation, or as_is=True."
        )
    return (plain.clamp(0, 1) * 255).round().to(torch.uint8)
