"""CUB-200, Oxford-IIIT Pet and Stanford Dogs, written small in their own formats."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from snugfit._data import ensure, load
from snugfit._data.catalog import ARCHIVES, SOURCES
from snugfit.errors import DataError

BIRDS = ("001.Black_footed_Albatross", "002.Laysan_Albatross", "003.Sooty_Albatross")
PETS = ("Abyssinian", "american_bulldog", "Egyptian_Mau")
DOGS = ("n02085620-Chihuahua", "n02085782-Japanese_spaniel", "n02089867-Walker_hound")
PER_CLASS = 8


def photo(path, label, i):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), (80 * label, 20 * i, 200)).save(path)


def is_test(i):
    return i % 4 == 3


def write_cub(root):
    base, images = root / "CUB_200_2011", []
    for label, bird in enumerate(BIRDS):
        for i in range(PER_CLASS):
            images.append((f"{bird}/{bird[4:]}_{i:04d}_{i}.jpg", label + 1, int(not is_test(i))))
            photo(base / "images" / images[-1][0], label, i)
    for place, name in enumerate(("images", "image_class_labels", "train_test_split")):
        lines = [f"{number} {image[place]}" for number, image in enumerate(images, start=1)]
        (base / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (base / "classes.txt").write_text("".join(f"{i} {bird}\n" for i, bird in enumerate(BIRDS, start=1)))
    return base


def write_pets(root):
    base, lists = root / "oxford-iiit-pet", {"trainval": [], "test": []}
    for label, breed in enumerate(PETS):
        for i in range(PER_CLASS):
            photo(base / "images" / f"{breed}_{i}.jpg", label, i)
            lists["test" if is_test(i) else "trainval"].append(f"{breed}_{i} {label + 1} {1 + label % 2} {label + 1}")
    photo(base / "images" / "Egyptian_Mau_999.jpg", 2, 9)  # in no list, as some of the original
    (base / "annotations").mkdir()
    for name, lines in lists.items():
        (base / "annotations" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return base


def save_list(path, names, labels):
    savemat = pytest.importorskip("scipy.io").savemat
    cells = np.empty((len(names), 1), dtype=object)
    cells[:, 0] = names
    savemat(path, {"file_list": cells, "annotation_list": cells, "labels": np.array(labels, dtype=float)[:, None]})


def write_dogs(root):
    base, lists = root / "stanford-dogs", {"train": ([], []), "test": ([], [])}
    for label, dog in enumerate(DOGS):
        for i in range(PER_CLASS):
            photo(base / "Images" / dog / f"{dog[:9]}_{i}.jpg", label, i)
            names, labels = lists["test" if is_test(i) else "train"]
            names.append(f"{dog}/{dog[:9]}_{i}.jpg")
            labels.append(label + 1)
    for part, (names, labels) in lists.items():
        save_list(base / f"{part}_list.mat", names, labels)
    return base


WRITERS = {"cub200": write_cub, "pets": write_pets, "dogs": write_dogs}
NAMES = {
    "cub200": ("Black_footed_Albatross", "Laysan_Albatross", "Sooty_Albatross"),
    "pets": PETS,
    "dogs": ("Chihuahua", "Japanese_spaniel", "Walker_hound"),
}


def open_set(name, base, **options):
    return load(name, data_dir=base.parent, **{"image_size": 16, **options})


def seen(part):
    """Class and number of every image of a set, told from its colour."""
    colours = part.images(np.arange(len(part))).double().mean((2, 3)).numpy()
    return [(round(red / 80), round(green / 20)) for red, green, _ in colours]


@pytest.mark.parametrize("name", WRITERS)
def test_parts_labels_and_constants(tmp_path, name):
    splits = load(name, data_dir=WRITERS[name](tmp_path).parent)
    assert splits.class_names == NAMES[name] and splits.image_shape == (3, 224, 224) and splits.flip
    assert splits.mean == (0.485, 0.456, 0.406) and splits.std == (0.229, 0.224, 0.225)
    assert seen(splits.test) == [(label, i) for label in range(3) for i in range(PER_CLASS) if is_test(i)]
    assert splits.test.labels.tolist() == [0, 0, 1, 1, 2, 2] and splits.test.labels.dtype == np.int64
    parts = (splits.train, splits.val)
    trained = [pair for part in parts for pair in zip(seen(part), part.labels, strict=True)]
    assert sorted(trained) == [((c, i), c) for c in range(3) for i in range(PER_CLASS) if not is_test(i)]
    splits.close()


@pytest.mark.parametrize("name", WRITERS)
def test_validation_leaves_the_test_part_alone(tmp_path, name):
    base = WRITERS[name](tmp_path)
    sets = [open_set(name, base, seed=seed, val_fraction=fraction) for seed, fraction in ((0, 0.1), (1, 0.4))]
    tests = [[str(splits.test.files[i]) for i in range(len(splits.test))] for splits in sets]
    assert tests[0] == tests[1] and len(tests[0]) == 6
    for splits in sets:
        files = {str(p.parent.files[int(i)]) for p in (splits.train, splits.val) for i in p.indices}
        assert len(files) == len(splits.train) + len(splits.val) == 18 and not files & set(tests[0])
    assert len(sets[0].val) == 3 and len(sets[1].val) == 6
    assert open_set(name, base, max_train=3, max_val=3).test.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", WRITERS)
def test_the_folder_itself_may_be_the_data_dir(tmp_path, name):
    assert len(load(name, data_dir=WRITERS[name](tmp_path), image_size=16).test) == 6


@pytest.mark.parametrize("name", WRITERS)
def test_missing_data_says_where_to_get_it(tmp_path, name, monkeypatch):
    monkeypatch.setattr("snugfit._data.catalog.can_download", lambda: False)
    with pytest.raises(DataError, match=rf"{name} is not in (.|\n)*https?://"):
        load(name, data_dir=tmp_path)


def edit(path, change):
    path.write_text(change(path.read_text()))


def replaced(old, new):
    return lambda text: text.replace(old, new, 1)


FAULTS = [
    ("cub200", "images.txt", None, "images.txt is missing"),
    ("cub200", "classes.txt", None, "classes.txt is missing"),
    ("cub200", "image_class_labels.txt", None, "image_class_labels.txt is missing"),
    ("cub200", "train_test_split.txt", None, "train_test_split.txt is missing"),
    ("cub200", "images.txt", replaced("_0003_3.jpg", "_0003_9.jpg"), r"line 4: .*_0003_9.jpg is missing"),
    ("cub200", "images.txt", replaced("5 001", "4 001"), "line 5: image 4 was listed before"),
    ("cub200", "images.txt", replaced("_0004_4", "_0003_3"), r"line 5: .*_0003_3.jpg was listed before"),
    ("cub200", "images.txt", replaced("5 001", "500 001"), "has no image 500"),
    ("cub200", "images.txt", lambda text: text.partition("\n")[2], "images.txt has no image 1"),
    ("cub200", "images.txt", replaced("5 001", "5 6 001"), "line 5: .* is not 2 fields"),
    ("cub200", "image_class_labels.txt", replaced("5 1", "5 4"), "line 5: '4' is not a number from 1 to 3"),
    ("cub200", "image_class_labels.txt", replaced("5 1", "5 0"), "line 5: '0' is not a number from 1 to 3"),
    ("cub200", "image_class_labels.txt", replaced("5 1", "4 1"), "line 5: image 4 was listed before"),
    ("cub200", "train_test_split.txt", replaced("5 1", "5 x"), "line 5: 'x' is not a number from 0 to 1"),
    ("cub200", "train_test_split.txt", lambda text: text.replace(" 1\n", " 0\n"), "no train images"),
    ("cub200", "classes.txt", replaced("2 002", "3 002"), "line 2: class 3 is not the next one"),
    ("cub200", "classes.txt", lambda text: "1 001.One\n", "1 class"),
    ("pets", "annotations/trainval.txt", None, "trainval.txt is missing"),
    ("pets", "annotations/test.txt", None, "test.txt is missing"),
    ("pets", "annotations/test.txt", replaced("Abyssinian_3 1", "Abyssinian_33 1"), r"line 1: .*_33.jpg is missing"),
    ("pets", "annotations/test.txt", replaced("Abyssinian_3 1", "Abyssinian_0 1"), r"_0.jpg was listed before"),
    ("pets", "annotations/test.txt", replaced("Abyssinian_3 1", "Abyssinian_3 38"), "is not a number from 1 to 37"),
    ("pets", "annotations/test.txt", replaced("Abyssinian_3 1", "Abyssinian_3 2"), "label 2 is for Abyssinian and"),
    ("pets", "annotations/test.txt", replaced("Abyssinian_3 1", "Abyssinian 1"), "does not begin with a breed"),
    ("pets", "annotations/test.txt", lambda text: "", "no test images"),
    ("pets", "annotations/test.txt", lambda text: text + "\nx", "line 8: 'x' is not 4 fields"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "change", "message"), FAULTS)
def test_what_is_wrong_with_a_list(tmp_path, name, file, change, message):
    base = WRITERS[name](tmp_path)
    (base / file).unlink() if change is None else edit(base / file, change)
    with pytest.raises(DataError, match=message):
        open_set(name, base)


@pytest.mark.parametrize(
    ("numbers", "label", "message"), [("01234567", 5, "no image of class 3"), ("4567", 4, "one class several labels")]
)
def test_labels_of_pets_have_no_gaps_and_one_class_each(tmp_path, numbers, label, message):
    base = write_pets(tmp_path)
    for part in ("trainval", "test"):
        path = base / "annotations" / f"{part}.txt"
        path.write_text(re.sub(rf"(Mau_[{numbers}]) 3 ", rf"\1 {label} ", path.read_text()))
    with pytest.raises(DataError, match=message):
        open_set("pets", base)


def test_comments_and_empty_lines_of_a_list_are_passed_over(tmp_path):
    base = write_pets(tmp_path)
    edit(base / "annotations" / "test.txt", lambda text: f"#Image CLASS-ID SPECIES BREED ID\n\n{text}")
    assert len(open_set("pets", base).test) == 6


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("content", [b"", b"<html>404</html>"])
def test_a_file_that_is_no_image_is_named(tmp_path, name, content):
    base = WRITERS[name](tmp_path)
    photos = sorted(base.rglob("*.jpg"))
    photos[3].write_bytes(content)
    with pytest.raises(DataError, match=rf"cannot read the image .*{photos[3].name}"):
        open_set(name, base)


def test_a_truncated_image_is_named_when_it_is_read(tmp_path):
    base = write_pets(tmp_path)
    broken = base / "images" / "Abyssinian_3.jpg"
    broken.write_bytes(broken.read_bytes()[:-60])
    with pytest.raises(DataError, match=r"cannot read the image .*Abyssinian_3"):
        seen(open_set("pets", base).test)


def test_binary_files_are_no_lists(tmp_path):
    base = write_pets(tmp_path)
    (base / "annotations" / "test.txt").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(DataError, match=r"test\.txt cannot be read"):
        open_set("pets", base)


def test_dogs_without_one_list(tmp_path):
    base = write_dogs(tmp_path)
    (base / "test_list.mat").unlink()
    with pytest.raises(DataError, match=r"test_list.mat is missing(.|\n)*--data folder:.*Images"):
        open_set("dogs", base)


@pytest.mark.parametrize("kept", [0, 100, 300])
def test_dogs_with_a_damaged_list(tmp_path, kept):
    base = write_dogs(tmp_path)
    path = base / "train_list.mat"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"train_list\.mat is damaged"):
        open_set("dogs", base)


@pytest.mark.parametrize(
    ("names", "labels", "message"),
    [
        ([f"{DOGS[0]}/n02085620_3.jpg"] * 2, [1, 1], "entry 2: .* was listed before"),
        ([f"{DOGS[0]}/n02085620_3.jpg"], [121], "'121' is not a number from 1 to 120"),
        ([f"{DOGS[0]}/n02085620_3.jpg"], [1.5], "'1.5' is not a number"),
        ([f"{DOGS[0]}/n02085620_3.jpg"], [2], "label 2 is for Chihuahua and Japanese_spaniel"),
        ([f"{DOGS[0]}/n02085620_3.jpg"], [1, 2], "has 1 names but 2 labels"),
        ([f"{DOGS[0]}/absent.jpg"], [1], "absent.jpg is missing"),
        ([7], [1], "is damaged or no list"),
    ],
)
def test_dogs_with_a_wrong_list(tmp_path, names, labels, message):
    base = write_dogs(tmp_path)
    save_list(base / "test_list.mat", names, labels)
    with pytest.raises(DataError, match=message):
        open_set("dogs", base)


def test_dogs_in_class_folders_need_no_lists(tmp_path):
    for label, dog in enumerate(DOGS):
        for i in range(PER_CLASS):
            photo(tmp_path / "dogs" / ("test" if is_test(i) else "train") / dog / f"{i}.jpg", label, i)
    splits = load("dogs", data_dir=tmp_path, image_size=16)
    assert splits.class_names == NAMES["dogs"] and (len(splits.train), len(splits.val)) == (15, 3)
    assert seen(splits.test) == [(label, i) for label in range(3) for i in (3, 7)]


def test_images_are_listed_as_names_alone(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("snugfit._data.fine_grained.check_headers", opened.extend)
    splits = open_set("pets", write_pets(tmp_path))
    assert type(splits.test.files).__name__ == "FileNames" and len(opened) == 24


def test_downloaded_pets_lie_in_a_folder_of_their_own(tmp_path, monkeypatch):
    source, calls = write_pets(tmp_path / "there"), []

    def fetch(url, root, extract_root=None, md5=None):
        calls.append((url, md5))
        part = "images" if "images" in url else "annotations"
        (source / part).rename(Path(extract_root) / part)

    datasets = types.ModuleType("torchvision.datasets")
    datasets.utils = types.SimpleNamespace(download_and_extract_archive=fetch)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)
    monkeypatch.setattr("snugfit._data.catalog.can_download", lambda: True)
    (tmp_path / "here").mkdir()
    assert ensure("pets", tmp_path / "here") == tmp_path / "here" / "oxford-iiit-pet"
    assert [url.rpartition("/")[2] for url, _ in calls] == ["images.tar.gz", "annotations.tar.gz"]
    assert sorted(p.name for p in (tmp_path / "here" / "oxford-iiit-pet").iterdir()) == ["annotations", "images"]
    assert len(load("pets", data_dir=tmp_path / "here", image_size=16).test) == 6
    assert len(calls) == 2 and set(ARCHIVES) <= set(SOURCES)
