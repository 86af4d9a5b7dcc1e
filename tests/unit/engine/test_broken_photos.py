"""Photos that cannot be decoded: the others of their batch are classified all the same."""

from pathlib import Path

import torch

from snugfit._engine.inference import _decode
from snugfit.errors import DataError


def decoder(paths):
    if any("broken" in path.name for path in paths):
        raise DataError("cannot read the image")
    return torch.stack([torch.full((3, 2, 2), float(path.stem)) for path in paths])


def test_readable_photos_keep_their_places_beside_broken_ones():
    broken = []
    paths, images = _decode([Path("1.jpg"), Path("broken.jpg"), Path("3.jpg")], decoder, broken)
    assert paths == [Path("1.jpg"), Path("3.jpg")] and images[:, 0, 0, 0].tolist() == [1, 3] and len(broken) == 1


def test_a_batch_of_broken_ones_is_empty():
    broken = []
    assert _decode([Path("broken.jpg")], decoder, broken) == ([], None) and len(broken) == 1
