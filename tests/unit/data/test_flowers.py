"""Oxford 102 Flower, written small in its own format, and what is wrong with MATLAB files that list images."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from snugfit._data import ensure, load
from snugfit._data.fine_grained import FLOWERS
from snugfit._data.matlab import read_vectors
from snugfit.errors import DataError

scipy_io = pytest.importorskip("scipy.io")
LABELS = np.array([[77, 1, 102, 1, 77, 102, 1, 77, 102, 102]], dtype=np.uint8)
SETS = {"trnid": [[10, 4, 5]], "valid": [[1, 2, 6]], "tstid": [[3, 7, 8, 9]]}


def save(path, **variables):
    scipy_io.savemat(path, variables, do_compression=True)


def sets(**changes):
    return {name: np.array(value, dtype=np.uint16) for name, value in {**SETS, **changes}.items()}


@pytest.fixture
def flowers(tmp_path):
    """The folder of ten photos; the red and the green of a photo are its number and its label."""
    base = tmp_path / "flowers-102"
    (base / "jpg").mkdir(parents=True)
    for image, label in enumerate(LABELS[0], start=1):
        Image.new("RGB", (40, 30), (20 * image, int(label), 200)).save(base / "jpg" / f"image_{image:05d}.jpg")
    save(base / "imagelabels.mat", labels=LABELS)
    save(base / "setid.mat", **sets())
    return base


def seen(part):
    colours = part.images(np.arange(len(part))).double().mean((2, 3)).numpy()
    return [(round(red / 20), round(green)) for red, green, _ in colours]


def fails(base, match):
    with pytest.raises(DataError, match=match) as caught:
        load("flowers102", data_dir=base.parent, image_size=16)
    return str(caught.value)


def test_there_are_102_kinds():
    assert len(set(FLOWERS)) == 102 and all(kind == " ".join(kind.split()) != "" for kind in FLOWERS)
    assert (FLOWERS[0], FLOWERS[11], FLOWERS[76], FLOWERS[101]) == (
        "pink primrose", "colt's foot", "passion flower", "blackberry lily",
    )  # fmt: skip


@pytest.mark.parametrize("compressed", [True, False])
def test_parts_are_those_of_the_lists(flowers, compressed):
    scipy_io.savemat(flowers / "setid.mat", sets(), do_compression=compressed)
    splits = load("flowers102", data_dir=flowers.parent)
    assert splits.class_names == FLOWERS and splits.image_shape == (3, 224, 224) and splits.flip
    for part, name in ((splits.train, "trnid"), (splits.val, "valid"), (splits.test, "tstid")):
        labels = LABELS[0, np.array(SETS[name][0]) - 1]
        assert (part.labels == labels.astype(np.int64) - 1).all() and part.labels.dtype == np.int64
        found = seen(part)
        assert [number for number, _ in found] == SETS[name][0]
        assert np.abs(np.array([green for _, green in found]) - labels).max() <= 2, "jpg keeps colours nearly"
    splits.close()


def test_its_own_validation_part_is_kept_by_every_seed(flowers):
    for seed in (0, 1):
        splits = load("flowers102", data_dir=flowers, image_size=16, seed=seed, val_fraction=0.4)
        assert (len(splits.train), len(splits.val), len(splits.test)) == (3, 3, 4)
    assert load("flowers102", data_dir=flowers, image_size=16, max_val=3).test.labels.tolist() == [101, 0, 76]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"trnid": [[10, 4, 11]]}, r"setid\.mat, trnid, entry 3: '11' is not a number from 1 to 10"),
        ({"trnid": [[0, 4, 5]]}, "trnid, entry 1: '0' is not a number"),
        ({"tstid": [[3, 7, 4, 9]]}, r"tstid, entry 3: image_00004\.jpg was listed before"),
        ({"valid": [[1, 2]]}, r"imagelabels\.mat has 10 labels, but .*setid\.mat names 9 images"),
        ({"valid": [[]]}, "'valid' is not a list"),
        ({"valid": [[1, 2], [6, 3]]}, r"'valid' is not a list but of shape \(2, 2\)"),
    ],
)
def test_what_is_wrong_with_the_division(flowers, changes, match):
    save(flowers / "setid.mat", **sets(**changes))
    fails(flowers, match)


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (LABELS[:, :9], "has 9 labels, but .* names 10 images"),
        (np.array([[103, *LABELS[0, 1:]]]), r"imagelabels\.mat, entry 1: '103' is not a number from 1 to 102"),
        (np.array([[*LABELS[0, :9], 0]]), "entry 10: '0' is not a number from 1 to 102"),
        (np.array([[1.5, *LABELS[0, 1:]]]), r"entry 1: '1\.5' is not a number"),
        (np.array([[np.nan, *LABELS[0, 1:]]]), "entry 1: 'nan' is not a number"),
        (LABELS + 1j, "no real number"),
        ("ten labels", "'labels' is of type char"),
        (LABELS == 1, "'labels' is of type logical"),
        (LABELS.astype(object), "'labels' is of type cell"),
        ({"first": 1}, "'labels' is of type struct"),
    ],
    ids=lambda value: getattr(value, "dtype", type(value).__name__) if not isinstance(value, str) else value[:20],
)
def test_what_is_wrong_with_the_labels(flowers, labels, match):
    save(flowers / "imagelabels.mat", labels=labels)
    message = fails(flowers, match)
    assert "imagelabels.mat" in message and message.count("\n") <= 1


def test_labels_in_columns_and_of_other_types_are_as_good(flowers):
    save(flowers / "imagelabels.mat", labels=LABELS.T.astype(float), more=np.zeros((3, 3)))
    assert load("flowers102", data_dir=flowers.parent, image_size=16).train.labels.tolist() == [101, 0, 76]


def test_a_variable_that_is_there_twice_or_not_at_all(flowers):
    path = flowers / "imagelabels.mat"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[128:])
    fails(flowers, "it has 2 variables 'labels'")
    save(path, lables=LABELS)
    fails(flowers, "it has 0 variables 'labels'")


def test_what_a_variable_is_said_to_be_is_checked_before_it_is_read(flowers, monkeypatch):
    monkeypatch.setattr("numpy.frombuffer", lambda *_, **__: pytest.fail("it was read"))
    save(flowers / "imagelabels.mat", labels=np.zeros((1, 10**6 + 1), dtype=np.uint8))
    fails(flowers, r"'labels' is not a list but of shape \(1, 1000001\)")


@pytest.mark.parametrize("kept", [0, 4, 128, 150, 0.9])
@pytest.mark.parametrize("name", ["imagelabels.mat", "setid.mat"])
def test_damaged_lists(flowers, name, kept):
    content = (flowers / name).read_bytes()
    (flowers / name).write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    fails(flowers, rf"{name} is damaged or no list of images \(.*Download it again")


@pytest.mark.parametrize(
    "content", [b"<html>404</html>" * 40, b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\2IM" + bytes(600)]
)
def test_other_files_are_no_lists(flowers, content):
    (flowers / "setid.mat").write_bytes(content)
    fails(flowers, r"setid\.mat is damaged or no list")


def test_missing_files(flowers):
    (flowers / "jpg" / "image_00004.jpg").unlink()
    fails(flowers, r"setid\.mat, trnid, entry 2: .*image_00004\.jpg is missing")
    (flowers / "imagelabels.mat").unlink()
    fails(flowers, r"imagelabels\.mat is missing")
    (flowers / "setid.mat").unlink()
    fails(flowers, r"flowers102 is not in (.|\n)*setid\.mat from https://")


def test_a_file_that_is_no_image(flowers):
    (flowers / "jpg" / "image_00004.jpg").write_bytes(b"<html>404</html>")
    fails(flowers, r"cannot read the image .*image_00004\.jpg")


def test_cells_hold_one_text_each(tmp_path):
    path = tmp_path / "list.mat"
    cells = np.empty((2, 1), dtype=object)
    for second in (7, np.array(["a", "b"]), np.array([["x"]], dtype=object), {"name": "x"}):
        cells[:, 0] = "first", second
        save(path, names=cells)
        with pytest.raises(DataError, match="damaged or no list"):
            read_vectors(path, texts=["names"])
    cells[1, 0] = "second"
    save(path, names=cells)
    assert read_vectors(path, texts=["names"]) == {"names": ["first", "second"]}


def test_the_division_is_fetched_last(flowers, tmp_path, monkeypatch):
    """A set is found by it, so that one of which only a part has arrived is fetched again."""
    fetched, here = [], tmp_path / "here"
    here.mkdir()

    def move(url, root, extract_root=None, md5=None):
        name = url.rpartition("/")[2]
        fetched.append((name, len(md5)))
        source = flowers / ("jpg" if extract_root else name)
        target = Path(extract_root or root)
        target.mkdir(exist_ok=True)
        source.rename(target / source.name)

    datasets = types.ModuleType("torchvision.datasets")
    datasets.utils = types.SimpleNamespace(download_and_extract_archive=move, download_url=move)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    monkeypatch.setattr("snugfit._data.catalog.can_download", lambda: True)
    assert ensure("flowers102", here) == here / "flowers-102"
    assert fetched == [("102flowers.tgz", 32), ("imagelabels.mat", 32), ("setid.mat", 32)]
    assert len(load("flowers102", data_dir=here, image_size=16).test) == 4
