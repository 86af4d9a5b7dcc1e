"""Images of a height and a width of their own: decoded, augmented and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from snugfit._data import Transform, from_dataset, load, load_boxed, read_folder
from snugfit.errors import UsageError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve photos of two classes, wide, tall and turned by EXIF."""
    rng = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        shape = (40, 90, 3) if number < 6 else (90, 40, 3)
        image, exif = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)), Image.Exif()
        exif[0x0112] = 6 if number == 11 else 1
        image.save(folder / f"{number:02}.png", exif=exif)
    return tmp_path


@pytest.mark.parametrize("size", [(16, 24), "16x24", [16, 24]])
def test_files_are_resized_to_cover_the_size_and_cropped(photos: Path, size: object) -> None:
    splits = load(f"folder:{photos}", image_size=size, val_fraction=0.3)
    assert splits.image_shape == (3, 16, 24)
    _, sets = read_folder(str(photos), image_size=(16, 24))
    files = sorted(photos.rglob("*.png"))
    got = sets[0].images(np.arange(12))
    for row, path in zip(got, files, strict=True):
        upright = ImageOps.exif_transpose(Image.open(path))
        expected = np.asarray(ImageOps.fit(upright, (24, 16), Image.Resampling.BILINEAR))
        assert np.array_equal(row.permute(1, 2, 0).numpy(), expected), path
    splits.close()


def test_images_of_own_data_sets_are_resized(photos: Path) -> None:
    files = [(Image.open(path), number % 2) for number, path in enumerate(sorted(photos.rglob("*.png")))] * 4
    found = from_dataset(files, files, image_size=(16, 24))
    assert found.image_shape == (3, 16, 24) == tuple(found.train.images(np.arange(3)).shape[1:])
    tensors = [(torch.rand(1, 30, 20), number % 2) for number in range(20)]
    found = from_dataset(tensors, tensors, image_size="10x8")
    assert found.train.images(np.arange(3)).shape == (3, 1, 10, 8)


@pytest.mark.parametrize(("height", "width"), [(20, 32), (80, 50)])
def test_crops_have_the_size_of_the_images(height: int, width: int) -> None:
    """A ramp in x and y shows where each pixel comes from; crops keep the direction of both."""
    rows, columns = torch.meshgrid(torch.arange(height) + 1, torch.arange(width) + 1, indexing="ij")
    images = torch.stack([rows, columns]).to(torch.uint8).expand(64, -1, -1, -1)
    got = Transform((0.0,) * 2, (1.0,) * 2, False)(images, train=True, seed=5) * 255
    assert got.shape == images.shape
    if height <= 64:  # padded by 4 and cropped: every pixel is one of the image, or black
        moved = got.round()
        inside = moved[:, 0] > 0
        down, right = moved[:, 0] - rows, moved[:, 1] - columns
        shifts = {(int(d[k].unique()), int(r[k].unique())) for d, r, k in zip(down, right, inside, strict=True)}
        assert max(max(map(abs, each)) for each in shifts) == 4 and len(shifts) > 20
    else:  # a part from 35 % to 100 %, whose ratio of sides is 3/4 to 4/3 of the image's
        tall, wide = (got[:, axis].flatten(1).amax(1) - got[:, axis].flatten(1).amin(1) for axis in (0, 1))
        shares, ratios = (tall + 1) / height * (wide + 1) / width, (wide + 1) / width / ((tall + 1) / height)
        assert 0.3 < shares.min() < 0.6 and 0.8 < shares.max() <= 1
        assert 0.7 < ratios.min() < 0.85 and 1.2 < ratios.max() < 1.4


def test_erased_rectangles_reach_every_side() -> None:
    images = torch.full((400, 1, 10, 30), 255, dtype=torch.uint8)
    got = Transform((0.0,), (1.0,), False, 1.0, crop=False)(images, train=True, seed=1)
    erased = (got == 0).float().mean((0, 1))
    assert erased[:, -3:].max() > 0 and erased[-2:].max() > 0 and (got == 0).flatten(1).any(1).all()


@pytest.mark.parametrize("size", ["8x", "0x8", (8, 8, 8), 0, (8, 2.5), "big"])
def test_what_is_no_size_is_refused(photos: Path, size: object) -> None:
    with pytest.raises(UsageError, match=r"--image-size must be a side of up to 65,536 pixels, or height and width"):
        load(f"folder:{photos}", image_size=size)


def test_records_and_boxes_are_square() -> None:
    with pytest.raises(UsageError, match=r"--image-size 8x16: the images of digits are square; only those of files"):
        load("digits", image_size="8x16")
    with pytest.raises(UsageError, match=r"--image-size 8x16: boxes are found in square images"):
        load_boxed("anything", image_size=(8, 16))
    assert load("digits", image_size=(16, 16)).image_shape == (1, 16, 16)
