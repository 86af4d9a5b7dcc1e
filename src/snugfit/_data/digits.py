"""The 8 x 8 digits that scikit-learn bundles: the default data, which needs no download."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch

from snugfit._data.sets import Parts, Subset, check_labels, resized
from snugfit._data.split import stratified
from snugfit.errors import DataError

_SPLIT_SEED = 0


class DigitImages:
    """1,797 grey images, kept as 8 x 8 bytes and upsampled per batch."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, image_size: int) -> None:
        self._pixels, self.labels, self._size = pixels, labels, image_size

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, indices: np.ndarray) -> torch.Tensor:
        """Read images, (B,) -> uint8 (B, 1, H, W)."""
        return resized(torch.from_numpy(self._pixels[indices]).unsqueeze(1), self._size)


def read(image_size: int) -> Parts:
    """Read the digits and divide them 80/10/10, always in the same way.

    Raises:
        DataError: scikit-learn is not installed.
    """
    table = _table()
    labels = table[:, 64].astype(np.int64)
    check_labels(labels, 10, "scikit-learn's digits")
    pixels = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    images = DigitImages(pixels, labels, image_size)
    train, val, test = (Subset(images, chosen) for chosen in stratified(labels, (0.1, 0.1), _SPLIT_SEED))
    return Parts(tuple("0123456789"), train, val, test)


def _table() -> np.ndarray:
    # Importing scikit-learn costs tens of MB, so its bundled file is read without importing it.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError('the digits come with scikit-learn, which is missing. Install it: pip install "snugfit[demo]"')
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        from sklearn.datasets import load_digits

        digits = load_digits()
        return np.column_stack((digits.data, digits.target))
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.float32)
