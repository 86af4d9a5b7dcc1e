"""Data sets of images with boxes: opened by folder or file, divided, batched, and augmented.

Augmentation is a random crop, a mirror image, and darknet's changes of colour. As in :mod:`snugfit._data.transform`,
every image has its own draws, so that its view does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from snugfit._core.amounts import sides_text
from snugfit._core.hardware import decoding_threads
from snugfit._core.keywords import SplitKeywords, with_keywords
from snugfit._core.options import from_keywords
from snugfit._core.paths import data_root, expanded
from snugfit._data import coco, yolo
from snugfit._data.batches import Batches
from snugfit._data.boxes import BOX, CLASS, NONE, BoxedData, BoxedImages
from snugfit._data.files import opening
from snugfit._data.sets import IMAGENET, Splits
from snugfit._data.split import SplitOptions
from snugfit._data.transform import Transform, cut, mirror, normalize, uniforms
from snugfit.errors import DataError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

IMAGE_SIZE = 608
"""YOLOv2's own, and that of the Tiled paper (section 5.2)."""
_LEAST = 3
JITTER = 0.2
"""Largest share of a side that a crop removes at each end; darknet's ``jitter``."""
HUE, SATURATION, EXPOSURE = 0.1, 1.5, 1.5
"""Darknet's ``hue`` (of the whole circle), and factors of ``saturation`` and ``exposure`` (or one over them)."""
_LEAST_LEFT = 0.1
"""Smallest share of a box inside a crop; with less, the object is dropped (ultralytics' value)."""
_CHUNK_VALUES = 1 << 18


class BoxedBatches(Batches):
    """Batches of images with boxes: targets (B, M, 5) instead of labels, see :mod:`snugfit.detection`."""

    def __init__(self, images: BoxedImages, transform: Transform, *, seed: int = 0, augment: bool = False) -> None:
        super().__init__(images, transform, seed=seed, augment=augment)
        self._boxed, self._with_boxes = images, BoxTransform(transform)

    def _batch(
        self, indices: np.ndarray, seed: tuple[int, ...], start: int, augment: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._with_boxes(self._boxed.images(indices), self._boxed.targets(indices), augment, seed, start)


def load_boxed(
    name: str, *, data_dir: str | Path | None = None, workers: int | str = "auto", **options: Unpack[SplitKeywords]
) -> Splits:
    r"""Open images with boxes, in YOLO's format or in COCO's; images stay on disk until they are read.

    >>> import snugfit
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> for part in ("images/train", "images/val", "labels/train", "labels/val"):
    ...     Path("boxes", part).mkdir(parents=True)
    >>> for part in ("train", "val"):
    ...     Image.new("RGB", (64, 48)).save(f"boxes/images/{part}/a.png")
    ...     _ = Path(f"boxes/labels/{part}/a.txt").write_text("0 0.5 0.5 0.25 0.25\n")
    >>> _ = Path("boxes/data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat]\n")
    >>> snugfit.load_boxed("boxes/data.yaml", image_size=64).class_names
    ('cat',)

    Images are resized to the square, whatever their ratio, so that boxes keep their fractions of the sides. Without a
    validation part, ``val_fraction`` of the training images is split off at random; existing parts do not change, and
    no test part is split off. Images without objects count as such.

    Args:
        name: a folder (``folder:`` before it is allowed), a ``data.yaml``, or an ``instances_*.json``.
        data_dir: folder in which a name that is not a path is searched; ``SNUGFIT_DATA`` otherwise.
        workers: threads that decode image files; ``"auto"`` takes one for each core, 2 at least and 8 at most.
        **options: ``image_size``: side of the images in pixels, 608 by default; ``classes``: expected number;
            ``max_train``, ``max_val``: limits of training images, and of validation and test images, chosen at random;
            ``val_fraction``: share of the images that validation gets if it has none of its own, 0.1 by default;
            ``seed``: seed of the choices.

    Raises:
        UnknownNameError: there is no such option.
        UsageError: a number makes no sense.
        DataError: there is no such data, it is damaged, or has another number of classes.
    """
    chosen = from_keywords(SplitOptions, options)
    size = chosen.sides or IMAGE_SIZE
    if not isinstance(size, int):
        raise UsageError(f"--image-size {sides_text(size)}: boxes are found in square images; give one side.")
    with opening(name):
        path = boxed_path(name, data_dir)
        names, parts, decoder, checks = _read(path, size, decoding_threads(workers))
    if chosen.classes is not None and chosen.classes != len(names):
        raise DataError(f"'{name}' has {len(names)} classes, not {chosen.classes}. Ask for {len(names)}.")
    limited = _chosen_parts(parts, chosen)
    if not len(limited["train"].boxes.rows):
        raise DataError(f"the training images of {path} have no boxes. Take more of them, or another --seed.")
    notes = tuple(f"{path}: {note}" for note in checks.notes)
    train, val, test = limited["train"], limited["val"], limited.get("test")
    return Splits(
        name, names, (3, size, size), train, val, test, *IMAGENET, flip=True, resources=(decoder,), notes=notes
    )


vars(load_boxed)["__signature__"] = with_keywords(load_boxed, vars(SplitOptions()))


def _chosen_parts(parts: dict[str, BoxedImages], chosen: SplitOptions) -> dict[str, BoxedImages]:
    """The images of each part within their limits; validation images are split off if there are none."""
    rng = np.random.default_rng(chosen.seed & 0xFFFFFFFF)
    if "val" not in parts:
        parts["train"], parts["val"] = _divided(parts["train"], chosen.val_fraction, rng)
    most = max(part.most for part in parts.values())
    return {
        part: _limited(images, chosen.max_train if part == "train" else chosen.max_val, rng).padded_to(most)
        for part, images in parts.items()
    }


def boxed_path(name: str, data_dir: str | Path | None = None) -> Path:
    """Resolve the name of a folder or file: as given, otherwise below the data folder."""
    plain = expanded(name.removeprefix("folder:"))
    if plain.exists():
        return plain
    if not plain.is_absolute() and (below := data_root(data_dir) / plain).exists():
        return below
    raise DataError(
        f"'{name}' does not exist. Detection takes a folder with images and labels (YOLO), a data.yaml, or a folder "
        "with annotations/instances_*.json (COCO)."
    )


def box_sizes(images: BoxedImages) -> np.ndarray:
    """Widths and heights of all boxes of some images, as fractions of the image's sides, (T, 2)."""
    return np.asarray(images.boxes.rows[:, 3:5])


def _read(path: Path, size: int, workers: int) -> BoxedData:
    if path.suffix == ".json":
        found = {"train": (path, coco.images_of(path, _above(path)))}
    else:
        found = coco.find_boxes(path) if path.is_dir() else {}
    if not found:
        return yolo.read_boxes(path, size, workers)
    if "train" not in found:
        missing = path / "annotations" / "instances_train*.json"
        raise DataError(f"{missing} is missing, but there are {' and '.join(found)} annotations in its folder.")
    return coco.read_boxes(found, size, workers)


def _above(path: Path) -> Path:
    return path.parent.parent if path.parent.name == "annotations" else path.parent


def _divided(images: BoxedImages, fraction: float, rng: np.random.Generator) -> Sequence[BoxedImages]:
    if len(images) < _LEAST:
        raise DataError(f"there are {len(images)} images, too few to split off some for validation. Add images.")
    order, count = rng.permutation(len(images)), max(1, round(fraction * len(images)))
    return images.chosen(np.sort(order[count:])), images.chosen(np.sort(order[:count]))


def _limited(images: BoxedImages, limit: int | None, rng: np.random.Generator) -> BoxedImages:
    order = rng.permutation(len(images))
    return images if limit is None or limit >= len(images) else images.chosen(np.sort(order[:limit]))


@dataclass(frozen=True)
class BoxTransform:
    """Turns stored images into a network's input, augmented for training together with their boxes."""

    plain: Transform

    def __call__(
        self, images: torch.Tensor, targets: np.ndarray, train: bool, seed: Sequence[int], start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise uint8 images (B, C, S, S), and augment them and their targets (B, M, 5) if ``train``.

        Returns:
            float32 (B, C, S, S), channels-last, and targets (B, M, 5) float32; a box that is cropped away becomes
            padding.
        """
        targets = targets.astype(np.float32, copy=True)
        if not train:
            return self.plain(images), torch.from_numpy(targets)
        output = torch.empty(images.shape, dtype=torch.float32, memory_format=torch.channels_last)
        mean, std = torch.tensor(self.plain.mean), torch.tensor(self.plain.std)
        step = max(1, _CHUNK_VALUES // images[0].numel())
        for first in range(0, len(images), step):
            rows = slice(first, first + step)
            chunk = images[rows]
            draws = uniforms(seed, start + first, len(chunk))
            if self.plain.crop:
                chunk = cropped(chunk, targets[rows], draws[:, 0:4])
            if self.plain.flip:
                chunk = mirrored(chunk, targets[rows], draws[:, 4] < 0.5)
            strip = max(1, _CHUNK_VALUES // chunk[:, :, 0].numel())  # large images in parts, to save memory
            for top in range(0, chunk.shape[2], strip):
                part = recoloured(chunk[:, :, top : top + strip].float() / 255, draws[:, 5:10])
                output[rows, :, top : top + strip] = normalize(part, mean, std)
        return output, torch.from_numpy(targets)


def cropped(images: torch.Tensor, targets: np.ndarray, draws: np.ndarray) -> torch.Tensor:
    """Remove a random share of up to 0.2 from each side of uint8 images (B, C, S, S), and resize the rest to S x S.

    Targets (B, M, 5) change in place; ``draws`` (B, 4) lie in [0, 1).
    """
    size = images.shape[-1]
    left, top, right, bottom = np.floor(draws * (JITTER * size + 1)).astype(np.int64).T
    width, height = size - left - right, size - top - bottom
    _follow(targets, np.stack([left, top], 1) / size, np.stack([width, height], 1) / size)
    return cut(images, left, top, width, height, size)


def mirrored(images: torch.Tensor, targets: np.ndarray, chosen: np.ndarray) -> torch.Tensor:
    """Mirror the chosen (B,) of the images (B, C, S, S) and, in place, their boxes (B, M, 5)."""
    turned = chosen[:, None] & (targets[..., CLASS] != NONE)
    targets[..., 1] = np.where(turned, 1 - targets[..., 1], targets[..., 1])
    return mirror(images, chosen)


def recoloured(images: torch.Tensor, draws: np.ndarray) -> torch.Tensor:
    """Change hue, saturation and brightness of images (B, 3, S, S) in [0, 1]; of grey ones (B, 1, S, S) the brightness.

    ``draws`` in [0, 1), (B, 5), are hue; saturation, and whether it goes up; brightness, and whether it goes up.
    """
    numbers = torch.from_numpy(draws).to(images.dtype).view(len(images), 5, 1, 1)
    saturation, exposure = (
        torch.where(numbers[:, up] < 0.5, 1 + numbers[:, by] * (most - 1), 1 / (1 + numbers[:, by] * (most - 1)))
        for by, up, most in ((1, 2, SATURATION), (3, 4, EXPOSURE))
    )
    if images.shape[1] == 1:
        return (images * exposure[:, None]).clamp(max=1)
    hue, grey, value = rgb_to_hsv(images)
    hue = hue + (numbers[:, 0] * 2 - 1) * HUE * 6
    return hsv_to_rgb(hue, (grey * saturation).clamp_(max=1), (value * exposure).clamp_(max=1))


def rgb_to_hsv(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hue in sixths of the circle, saturation and value, each (B, S, S), of images (B, 3, S, S) in [0, 1]."""
    value, range_ = images.amax(1), images.amax(1) - images.amin(1)
    red, green, blue = images.unbind(1)
    divisor = range_.where(range_ > 0, 1)
    others = torch.where(green == value, (blue - red) / divisor + 2, (red - green) / divisor + 4)
    hue = torch.where(red == value, (green - blue) / divisor, others) % 6
    return hue, range_ / value.where(value > 0, 1), value


def hsv_to_rgb(hue: torch.Tensor, saturation: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Images (B, 3, S, S) in [0, 1] of hue in sixths of the circle, saturation and value, each (B, S, S)."""
    range_ = value * saturation
    steps = ((hue + start) % 6 for start in (5, 3, 1))
    return torch.stack([value - range_ * torch.minimum(step, 4 - step).clamp_(0, 1) for step in steps], dim=1)


def _follow(targets: np.ndarray, corner: np.ndarray, share: np.ndarray) -> None:
    """Adapt boxes (B, M, 5) in place to a crop of ``share`` (B, 2) of the sides from ``corner`` (B, 2) on."""
    boxes = targets[..., BOX]
    low = ((boxes[..., :2] - boxes[..., 2:] / 2) - corner[:, None]) / share[:, None]
    high = ((boxes[..., :2] + boxes[..., 2:] / 2) - corner[:, None]) / share[:, None]
    inner_low, inner_high = low.clip(0, 1), high.clip(0, 1)
    left = (inner_high - inner_low).prod(axis=2) >= _LEAST_LEFT * (high - low).prod(axis=2)
    real = (targets[..., CLASS] != NONE) & left
    targets[..., CLASS] = np.where(real, targets[..., CLASS], NONE)
    moved = np.concatenate([(inner_low + inner_high) / 2, inner_high - inner_low], axis=2)
    targets[..., BOX] = np.where(real[..., None], moved, 0)
