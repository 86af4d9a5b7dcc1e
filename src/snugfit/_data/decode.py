"""Image files to uint8 batches of one size, decoded in a few threads."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from snugfit._core.amounts import Sides, height_and_width
from snugfit._core.own_cores import leave_own_core
from snugfit._data.files import check_regular, walk
from snugfit.errors import DataError, UsageError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp"})
NOT_READ = frozenset({".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".ppm", ".pgm"})
"""Extensions of images that are refused; leaving them out would train on fewer images than there are."""
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
for _plugin in ("Jpeg", "Png", "WebP", "Gif", "Bmp"):  # now, and not when memory counts
    importlib.import_module(f"PIL.{_plugin}ImagePlugin")
MOST_PIXELS = 50_000_000
"""Largest number of pixels that are decoded: 200 MB. A plain JPEG is shrunk first, by up to 8 a side."""
LARGEST_FILE = 1 << 28
MOST_SCANS = 100
"""Largest number of scans of a progressive JPEG; encoders write about ten."""
_SCAN = re.compile(rb"\xff\xda")
_ORIENTATION = 0x0112
T = TypeVar("T")


class Decoder:
    """Decodes image files to one size, in ``workers`` threads that live until :meth:`close`, or in the caller's.

    Images of 3 channels (RGB) or 1 (grey) are resized and centre-cropped to a square, or to a height and width; or
    without ``crop`` resized to it, whatever their ratio.
    """

    def __init__(self, image_size: Sides, channels: int = 3, workers: int = 2, *, crop: bool = True) -> None:
        if workers < 0 or channels not in (1, 3):
            raise UsageError(f"cannot decode to {channels} channel(s) with {workers} worker(s).")
        self.image_size, self.channels, self._crop = image_size, channels, crop
        self._pool = (
            ThreadPoolExecutor(workers, thread_name_prefix="decode", initializer=leave_own_core) if workers else None
        )

    def __call__(self, paths: Sequence[Path]) -> torch.Tensor:
        """Decode files into a uint8 tensor (B, C, H, W), laid out channels-last."""
        batch = np.empty((len(paths), *height_and_width(self.image_size), self.channels), dtype=np.uint8)
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


def decode(path: Path, size: Sides, channels: int = 3, *, crop: bool = True) -> Image.Image:
    """Decode one file as RGB or grey of this size, upright (EXIF); JPEG is shrunk while it is decoded."""
    return _guarded(path, lambda image: fitted(image, size, channels, crop=crop))


def image_files(folder: Path, links: list[Path]) -> list[Path]:
    """All images below a folder, as :func:`walk` lists them; one of a format that is not read is a ``DataError``."""
    files = walk(folder, EXTENSIONS | NOT_READ, links)
    for file in files:
        _check_format(file)
    return files


def _check_format(path: Path) -> None:
    if path.suffix.lower() in NOT_READ:
        read = ", ".join(sorted(EXTENSIONS))
        raise DataError(f"the image {path} is of a format that is not read. Convert it to one of {read}, or remove it.")


def upright_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels of an image as :func:`decode` sees it, without decoding it."""

    def size(image: Image.Image) -> tuple[int, int]:
        sideways = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
        return (image.height, image.width) if sideways else (image.width, image.height)

    return _guarded(path, size)


def check_headers(paths: Iterable[Path]) -> None:
    """Open every file without decoding it; one that is empty or no image is a ``DataError``."""
    for path in paths:
        _guarded(path, lambda image: image.size)


def fitted(image: Image.Image, size: Sides, channels: int = 3, *, crop: bool = True) -> Image.Image:
    """Turn an image upright, resize it to cover ``size``, crop the centre, and convert it to RGB or grey.

    Without ``crop`` both sides are resized. Over 50 million pixels after shrinking are a ``ValueError``.
    """
    height, width = height_and_width(size)
    image.draft(None, (max(height, width),) * 2)  # it may be sideways
    _check_pixels(*image.size)
    ImageOps.exif_transpose(image, in_place=True)
    converted = _in_mode(image, "RGB" if channels == 3 else "L")
    if crop:
        return ImageOps.fit(converted, (width, height), Image.Resampling.BILINEAR)
    return converted.resize((width, height), Image.Resampling.BILINEAR)


def _guarded(path: Path, use: Callable[[Image.Image], T]) -> T:
    check_regular(path)
    _check_format(path)
    advice = "Replace it (a run that has started needs the same number of images), or remove it."
    with reading(f"the image {path}", advice), _Bounded(io.FileIO(path)) as file:
        _check_file(file)
        with Image.open(file, formats=_FORMATS) as image:
            _check_size(image, file)
            return use(image)


class _Bounded(io.BufferedReader):
    """A file whose reads end at its size; a damaged header may request more, and the bytes are allocated at once."""

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw)
        self.bytes = os.fstat(raw.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most the bytes that remain."""
        left = max(0, self.bytes - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


@contextlib.contextmanager
def reading(what: str, advice: str) -> Iterator[None]:
    """Turn any exception of a decoder into a ``DataError``, or a ``MemoryError`` if there is no memory to decode."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # decoders raise nearly anything: OverflowError, struct.error, AssertionError ...
        if isinstance(error, OSError) and "out of memory" in str(error):
            raise MemoryError(f"no memory to decode {what}") from error
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else str(error) or "corrupt"
        raise DataError(f"cannot read {what}: {reason}. {advice}") from error


def _check_file(file: _Bounded) -> None:
    """Refuse files that decoders would read as a whole."""
    start = file.read(30)
    if file.bytes > LARGEST_FILE:
        raise ValueError(f"{file.bytes:,} bytes are more than {LARGEST_FILE:,}")
    if start[8:12] == b"WEBP":
        _check_pixels(*_webp_size(start))


def _webp_size(start: bytes) -> tuple[int, int]:
    """Width and height in a WebP's first 30 bytes; opening the file allocates two images of that size."""
    kind, word = start[12:16], int.from_bytes(start[21:25], "little")
    if kind == b"VP8X":
        return int.from_bytes(start[24:27], "little") + 1, int.from_bytes(start[27:30], "little") + 1
    if kind == b"VP8L":
        return (word & 0x3FFF) + 1, (word >> 14 & 0x3FFF) + 1
    return int.from_bytes(start[26:28], "little") & 0x3FFF, int.from_bytes(start[28:30], "little") & 0x3FFF


def _check_size(image: Image.Image, file: _Bounded) -> None:
    """Refuse images that take too much memory or time: only plain JPEGs are shrunk while they are decoded."""
    progressive = "progressive" in image.info
    if image.format != "JPEG" or progressive:
        _check_pixels(*image.size)
    if progressive:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            scans = sum(1 for _ in itertools.islice(re.finditer(_SCAN, content), MOST_SCANS + 1))
        if scans > MOST_SCANS:
            raise ValueError(f"over {MOST_SCANS} scans, each of which takes as long as an image")


def _check_pixels(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise ValueError(f"{width} x {height} pixels are more than {MOST_PIXELS:,}")


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "F" or (image.mode == "I" and image.format is None):
        raise ValueError(f"pixels of mode {image.mode} have no known range; convert the image to mode L or RGB")
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)
