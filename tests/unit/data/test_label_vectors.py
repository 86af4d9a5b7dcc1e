"""Data whose images may have several labels: vectors of a caller's data set, and files that a labels.csv lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset, TensorDataset

import snugfit
from snugfit._data import Batches, Splits, Transform
from snugfit._data.labels_file import load_labelled
from snugfit._data.multi_label import strata
from snugfit.errors import DataError

VECTORS = [[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]]


def pairs(count: int = 40, make: Any = torch.tensor) -> list[Any]:
    return [(torch.full((3, 8, 8), index / count), make(VECTORS[index % 4])) for index in range(count)]


@pytest.mark.parametrize(
    "make",
    [torch.tensor, np.array, list, tuple, lambda each: torch.tensor(each).float(), lambda each: np.array(each) > 0],
    ids=["tensor", "array", "list", "tuple", "float", "bool"],
)
def test_labels_are_vectors_of_any_kind(make: Any) -> None:
    splits = snugfit.from_dataset(pairs(make=make), pairs(8, make), class_names=("cat", "dog", "night"))
    assert splits.train.has_several_labels and splits.class_names == ("cat", "dog", "night")
    assert splits.train.labels.dtype == np.uint8 and splits.val.labels.tolist() == VECTORS * 2


def test_loaders_dictionaries_and_subsets_give_them_too() -> None:
    images, labels = torch.rand(40, 3, 8, 8), torch.tensor(VECTORS * 10)
    plain = TensorDataset(images, labels)
    named = [{"image": image, "labels": label} for image, label in plain]
    for data in (plain, DataLoader(plain, 5), named, Subset(plain, range(40))):
        assert snugfit.from_dataset(data, data).train.labels.tolist() == VECTORS * 10
    assert snugfit.from_dataset(Subset(plain, [2, 1]), plain).train.labels.tolist() == [VECTORS[2], VECTORS[1]]


def test_batches_have_targets_of_the_loss() -> None:
    splits = snugfit.from_dataset(pairs(), pairs(8))
    batches = Batches(splits.train, Transform(splits.mean, splits.std, splits.flip))
    targets = torch.cat([labels for _, labels in batches.in_order(7)])
    assert targets.dtype == torch.float32 and targets.tolist() == VECTORS * 10
    for images, labels in batches.epoch(0, 8):
        rows = ((images.mean((1, 2, 3)) * 0.5 + 0.5) * 40).round().long()  # an image's value is its number / 40
        assert labels.tolist() == [VECTORS[row % 4] for row in rows]


def test_one_logit_serves_two_classes() -> None:
    data = [(torch.rand(3, 8, 8), torch.tensor([index % 2.0])) for index in range(30)]
    assert snugfit.from_dataset(data).class_names == ("0",)
    numbers = [(torch.rand(3, 8, 8), torch.tensor([index % 3])) for index in range(30)]
    assert snugfit.from_dataset(numbers).class_names == ("0", "1", "2")  # an integer in brackets is a class


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([1, 0], r"item 3 of the train data set has shape \(2,\), but the first has \(3,\)"),
        ([1, 0, 2], "item 3 of the train data set holds something else than 0 and 1"),
        ([0.5, 0.5, 0.0], "something else than 0 and 1"),
        (1, r"item 3 of the train data set has shape \(\)"),
        (["a", "b", "c"], "something else than 0 and 1"),
    ],
)
def test_other_labels_are_refused(change: Any, said: str) -> None:
    data = pairs(make=list)
    data[3] = (data[3][0], change)
    with pytest.raises(DataError, match=said):
        snugfit.from_dataset(data)


def test_splits_have_the_same_kind_of_labels() -> None:
    with pytest.raises(DataError, match=r"train vectors of 3, val integers.*Give vectors of one length"):
        snugfit.from_dataset(pairs(), [(torch.rand(3, 8, 8), index % 2) for index in range(8)])
    with pytest.raises(DataError, match="2 class names, but labels are vectors of 3"):
        snugfit.from_dataset(pairs(), class_names=("cat", "dog"))


def test_an_image_counts_to_its_rarest_label() -> None:
    labels = np.array([[1, 1, 0]] * 6 + [[1, 0, 0]] * 10 + [[0, 0, 0]] * 8 + [[1, 1, 1]], np.uint8)
    assert strata(labels).tolist() == [1] * 6 + [0] * 10 + [3] * 8 + [2]
    assert strata(labels, 3).tolist() == [1] * 6 + [0] * 10 + [3] * 8 + [0]
    assert strata(np.array([2, 0, 2])).tolist() == [2, 0, 2]


def test_every_label_is_in_every_split() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random((400, 4)) < (0.5, 0.3, 0.1, 0.05)).astype(np.int64)
    data = [(torch.zeros(3, 8, 8), label) for label in labels]
    splits = snugfit.from_dataset(data, max_train=100)
    for part in (splits.train, splits.val, splits.test):
        assert part is not None and (part.labels.sum(0) > 0).all()
    assert (len(splits.train), len(splits.val)) == (100, len(splits.test))
    every = snugfit.from_dataset(data)
    assert len(every.train) + len(every.val) + len(every.test) == 400


ROWS = {"0.jpg": "cat;dog", "1.png": "", "2.png": "dog", "3.png": "bird; cat ;cat"}
EXPECTED = [[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 1, 0]]


def write(folder: Path, text: str | None = None, copies: int = 1) -> Path:
    """A folder of images with a labels.csv."""
    rows = [(f"{copy}-{name}", labels) for copy in range(copies) for name, labels in ROWS.items()]
    for name, _ in rows:
        (folder / "photos").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (40, 90, 9)).save(folder / "photos" / name)
    lines = ["file,labels", *(f"photos/{name},{labels}" for name, labels in rows)]
    (folder / "labels.csv").write_text("\n".join(lines) if text is None else text)
    return folder


def columns() -> str:
    rows = [f"photos/0-{name},{','.join(map(str, row))}" for name, row in zip(ROWS, EXPECTED, strict=True)]
    return "\n".join(["filename,bird,cat,dog", *rows, ""])


def parts(splits: Splits) -> list[Any]:
    return [part.labels.tolist() for part in (splits.train, splits.val, splits.test) if part is not None]


def species() -> str:
    return "\n".join(["image,species", *(f"photos/0-{name},{labels}" for name, labels in ROWS.items())])


@pytest.mark.parametrize("text", [None, columns(), species()], ids=["names", "columns", "another header"])
def test_files_have_the_labels_of_their_line(tmp_path: Path, text: str | None) -> None:
    for part in ("train", "valid", "test"):
        write(tmp_path / part, text)
    splits = load_labelled(f"folder:{tmp_path}", image_size=(8, 12))
    assert splits.class_names == ("bird", "cat", "dog") and splits.image_shape == (3, 8, 12)
    assert parts(splits) == [EXPECTED] * 3
    assert splits.train.images(np.arange(2)).shape == (2, 3, 8, 12)
    splits.close()


def test_a_single_column_may_be_a_class(tmp_path: Path) -> None:
    rows = "\n".join(f"photos/{copy}-0.jpg,{copy % 2}" for copy in range(10))
    splits = load_labelled(str(write(tmp_path, f"file,cat\n{rows}\n", copies=10)), image_size=8)
    assert splits.class_names == ("cat",)
    assert sorted(row for part in parts(splits) for row in part) == [[0]] * 5 + [[1]] * 5


def test_one_list_is_divided(tmp_path: Path) -> None:
    splits = load_labelled(str(write(tmp_path / "a", copies=10) / "labels.csv"), image_size=8)
    assert sorted(row for part in parts(splits) for row in part) == sorted(EXPECTED * 10)
    assert len(splits.val) == len(splits.test) == 4
    for part in ("train", "val"):
        write(tmp_path / "b" / part, copies=10)
    held_out = load_labelled("b", data_dir=tmp_path, image_size=8)
    assert len(held_out.test) == 40 and len(held_out.train) + len(held_out.val) == 40


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "begins with ''.*has a line 'file,labels'"),
        ("file\nphotos/0-0.jpg\n", "begins with 'file'"),
        ("file,labels\n", "lists no images"),
        ("file,labels\nphotos/0-0.jpg,\n", "no image has a label"),
        ("file,labels\nphotos/0-0.jpg,a\nphotos/0-0.jpg,b\n", "line 3: photos/0-0.jpg was listed before"),
        ("file,labels\nphotos/none.jpg,a\n", "line 2: .*none.jpg is missing"),
        ("file,labels\n../x.jpg,a\n", "'../x.jpg' is not a file below"),
        ("file,labels\nphotos/0-0.jpg,a,b\n", "line 2: there are 3 columns, but the first line has 2"),
        ("file,a,a\nphotos/0-0.jpg,1,0\n", "begins with 'file,a,a'"),
        ("file,a,b\nphotos/0-0.jpg,1,yes\n", "line 2: 'yes' is neither 0 nor 1"),
        ("photos/0-0.jpg,cat\nphotos/0-1.png,dog\n", "begins with an image, and has no line with the names"),
    ],
)
def test_a_bad_list_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        load_labelled(str(write(tmp_path, text)))


def test_a_folder_without_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no labels.csv, and no train/labels.csv"):
        load_labelled(str(tmp_path))
    with pytest.raises(DataError, match=r"'digits' does not exist. --task multi-label takes a folder"):
        load_labelled("digits", data_dir=tmp_path)
