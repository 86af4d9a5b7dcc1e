"""Items that a caller's data set has prepared itself, which are used as they are.

They are float tensors of any size, or several inputs, packed into one float tensor without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np
import torch

from snugfit._core.inputs import Input, InputDtype, packed_shape
from snugfit._data.sets import ImageSet
from snugfit._data.transform import Transform
from snugfit.errors import DataError

_LARGEST_INTEGER = 2**24
"""Up to it float32 holds every integer."""


@dataclass(eq=False)
class PreparedImages(ImageSet):
    """Images of a map-style data set, read one by one in the caller's thread.

    Attributes:
        sample: the image, float (C, H, W), and the label of an item.
        labels: (N,) int64, or (N, classes) uint8.
        shape: (C, H, W) of every image.
    """

    sample: Callable[[int], tuple[Any, Any]]
    labels: np.ndarray
    shape: tuple[int, int, int]
    runs_own_code = True

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> float32 (B, C, H, W) in channels_last."""
        batch = torch.empty((len(indices), *self.shape), memory_format=torch.channels_last)
        for row, index in enumerate(indices):
            image = self.sample(int(index))[0]
            self._check(image, int(index))
            batch[row] = image
        return batch

    def _check(self, image: Any, index: int) -> None:
        shape = prepared_shape(image, index)
        if shape != self.shape:
            raise DataError(f"image {index} has shape {shape}, but the first has {self.shape}. Resize them to one.")
        if not torch.isfinite(image).all():
            raise DataError(f"image {index} holds NaN or infinite values. Replace or remove it.")


def prepared_shape(image: Any, index: int) -> tuple[int, int, int]:
    """Channels, height and width of an image; raises DataError if it is no float tensor (C, H, W)."""
    if not (isinstance(image, torch.Tensor) and image.is_floating_point() and image.ndim == 3 and image.numel()):
        is_ = f"of {image.dtype} and shape {tuple(image.shape)}" if isinstance(image, torch.Tensor) else type(image)
        raise DataError(f"image {index} is {is_}; as_is=True takes float tensors of (channels, height, width).")
    channels, height, width = image.shape
    return channels, height, width


class AsIs(Transform):
    """Leaves prepared images as they are."""

    def __call__(
        self, images: torch.Tensor, train: bool = False, seed: int | Sequence[int] = 0, start: int = 0
    ) -> torch.Tensor:
        """The images, float32 (B, C, H, W); nothing is augmented."""
        return images


@dataclass(eq=False)
class PackedInputs(ImageSet):
    """Items of a map-style data set, read one by one in the caller's thread.

    Attributes:
        sample: the inputs and the label of an item.
        labels: (N,) int64, or (N, classes) uint8.
        inputs: those of every item.
    """

    sample: Callable[[int], tuple[Any, Any]]
    labels: np.ndarray
    inputs: tuple[Input, ...]
    runs_own_code = True

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read items, (B,) -> float32 (B, 1, 1, N): the values of an item's inputs, one after another."""
        batch = torch.empty((len(indices), *packed_shape(self.inputs)))
        for row, index in enumerate(indices):
            torch.cat(list(self._values(int(index))), out=batch[row, 0, 0])
        return batch

    def _values(self, index: int) -> Iterator[torch.Tensor]:
        """The values (n,) of each input of an item, as float32."""
        given = self.sample(index)[0]
        if not takes_several(given) or len(given) != len(self.inputs):
            has = f"{len(given)} input(s)" if takes_several(given) else "no several inputs"
            raise DataError(f"item {index} has {has}, but the first has {len(self.inputs)}. Give all the same.")
        for number, expected in enumerate(self.inputs):
            key = expected.name if isinstance(given, Mapping) else number
            if isinstance(given, Mapping) and key not in given:
                raise DataError(f"item {index} has no input {key}, as the first has. Give all the same.")
            value, found = _described(given[key], key, index)
            if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                raise DataError(f"input {key} of item {index} is {found}, but that of the first is {expected}.")
            if value.is_floating_point() and not torch.isfinite(value.float()).all():
                raise DataError(
                    f"input {key} of item {index} holds NaN, or values that float32 cannot. Replace or remove it."
                )
            check_integers(value, f"input {key} of item {index}")
            yield value.reshape(-1).float()


def takes_several(given: Any) -> bool:
    """Whether the first part of an item is several inputs: a tuple, a list or a dictionary."""
    return isinstance(given, (tuple, list, Mapping))


def inputs_of(given: Any, index: int) -> tuple[Input, ...]:
    """The inputs of an item of at least two; raises DataError if one is no tensor, array or number."""
    if len(given) < 2:
        raise DataError(f"item {index} has {len(given)} input(s), not several; give the tensor itself.")
    named = isinstance(given, Mapping)
    pairs = given.items() if named else enumerate(given)
    return tuple(
        Input(found.shape, found.dtype, str(key) if named else "")
        for key, value in pairs
        for found in [_described(value, key, index)[1]]
    )


def _described(value: Any, key: object, index: int) -> tuple[torch.Tensor, Input]:
    """An input as a tensor of any shape, and what it is."""
    place = f"input {key} of item {index}"
    if isinstance(value, (bool, int, float, np.ndarray, np.generic)):
        value = _as_tensor(value)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise DataError(f"{place} is a {type(value).__name__}, not a dense tensor, an array of numbers or a number.")
    value = value.detach()
    dtype = "float32" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
    if dtype not in get_args(InputDtype):
        raise DataError(f"{place} is of {dtype}; inputs are floats, booleans, or signed integers and uint8.")
    if not value.numel():
        raise DataError(f"{place} is empty. Give all items the same shape.")
    return value, Input(tuple(value.shape), cast(InputDtype, dtype))


def _as_tensor(value: Any) -> Any:
    """An array of any shape, or a number, as a tensor; itself if torch has no such type."""
    try:
        return torch.as_tensor(np.ascontiguousarray(value).reshape(np.shape(value)))
    except TypeError:
        return value


def check_integers(value: torch.Tensor, place: str) -> None:
    """Refuse integers of any shape that float32 cannot hold; ``place`` is where they are."""
    if value.dtype in (torch.int32, torch.int64):
        largest = max(int(value.max()), -int(value.min()))
        if largest > _LARGEST_INTEGER:
            raise DataError(
                f"{place} holds {largest:,}; integers are packed as float32, up to {_LARGEST_INTEGER:,}. Number them "
                "from 0."
            )
