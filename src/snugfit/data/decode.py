"""Image files to square uint8 batches, decoded in a few threads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import (  # noqa: F401
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from snugfit.errors import DataError, UsageError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp"})
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)
_ORIENTATION = 0x0112
T = TypeVar("T")


class Decoder:
    """Decodes image files to one size, in ``workers`` threads that live until :meth:`close`.

    Args:
        image_size: side of the square that images are resized (short side) and centre-cropped to.
        channels: 3 (RGB) or 1 (grey).
        workers: threads; 0 decodes in the caller's thread.
        crop: crop to the square; otherwise both sides are resized to it, whatever their ratio.
    """

    def __init__(self, image_size: int, channels: int = 3, workers: int = 2, *, crop: bool = True) -> None:
        if workers < 0 or channels not in (1, 3):
            raise UsageError(f"cannot decode to {channels} channel(s) with {workers} worker(s).")
        self.image_size, self.channels, self._crop = image_size, channels, crop
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode") if workers else None

    def __call__(self, paths: Sequence[Path]) -> torch.Tensor:
        """Decode files into a uint8 tensor (B, C, H, W), laid out channels-last.

        Raises:
            DataError: a file is corrupt, truncated or no image; the message names it.
        """
        batch = np.empty((len(paths), self.image_size, self.image_size, self.channels), dtype=np.uint8)
        run = self._pool.map if self._pool else map
        for _ in run(self._decode_into, batch, paths):
            pass
        return torch.from_numpy(batch).permute(0, 3, 1, 2)

    def _decode_into(self, row: np.ndarray, path: Path) -> None:
        row[...] = np.asarray(decode(path, self.image_size, self.channels, crop=self._crop)).reshape(row.shape)

    def close(self) -> None:
        """Stop the threads."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


def decode(path: Path, size: int, channels: int = 3, *, crop: bool = True) -> Image.Image:
    """Decode one file as ``size`` x ``size`` RGB or grey, upright (EXIF); JPEG is shrunk while it is decoded.

    Args:
        path: the file.
        size: side in pixels.
        channels: 3 (RGB) or 1 (grey).
        crop: crop to the square, or resize both sides to it.

    Raises:
        DataError: the file is corrupt, truncated or no image.
    """
    return _guarded(path, lambda image: square(image, size, channels, crop=crop))


def upright_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels of an image as :func:`decode` sees it, without decoding it.

    Raises:
        DataError: the file is empty or no image.
    """

    def size(image: Image.Image) -> tuple[int, int]:
        sideways = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
        return (image.height, image.width) if sideways else (image.width, image.height)

    return _guarded(path, size)


def check_headers(paths: Iterable[Path]) -> None:
    """Open every file without decoding it.

    Raises:
        DataError: one is empty or no image.
    """
    for path in paths:
        _guarded(path, lambda image: image.size)


def square(image: Image.Image, size: int, channels: int = 3, *, crop: bool = True) -> Image.Image:
    """Turn an image upright, resize its short side to ``size``, crop the centre, and convert it to RGB or grey.

    Without ``crop`` both sides are resized.
    """
    image.draft(None, (size, size))
    ImageOps.exif_transpose(image, in_place=True)
    converted = _in_mode(image, "RGB" if channels == 3 else "L")
    if crop:
        return ImageOps.fit(converted, (size, size), Image.Resampling.BILINEAR)
    return converted.resize((size, size), Image.Resampling.BILINEAR)


def _guarded(path: Path, use: Callable[[Image.Image], T]) -> T:
    try:
        with Image.open(path, formats=_FORMATS) as image:
            return use(image)
    except _UNREADABLE as error:
        if "memory" in str(error).replace(str(path), ""):
            raise MemoryError(f"no memory to decode {path}") from error
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else str(error) or "corrupt"
        raise DataError(
            f"cannot read the image {path}: {reason}. Replace it (a run that has begun needs as "
            "many images as then), or remove it."
        ) from error


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)
