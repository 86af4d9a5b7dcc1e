"""Photos that cannot be decoded: the others of their batch are classified all the same."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from snugfit._data.decode import Decoder
from snugfit._engine.inference import _decode, _image_paths
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


def test_an_image_of_a_format_that_is_not_read_is_told_like_a_broken_one(tmp_path):
    for name in ("1.png", "2.tiff"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    broken = []
    assert _decode(_image_paths(tmp_path), Decoder(4, workers=0), broken)[0] == [tmp_path / "1.png"]
    assert [str(each).partition(" Convert")[0] for each in broken] == [
        f"the image {tmp_path / '2.tiff'} is of a format that is not read."
    ]


def test_a_folder_that_is_named_like_an_image_is_none(tmp_path):
    (tmp_path / "holiday.jpg").mkdir()
    (tmp_path / "holiday.jpg" / "1.png").touch()
    assert _image_paths(tmp_path) == [tmp_path / "holiday.jpg" / "1.png"]


def test_a_folder_that_does_not_exist_is_told(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        _image_paths(tmp_path / "nowhere")
    with pytest.raises(DataError, match="there are no images in"):
        _image_paths(tmp_path)
