"""Files of Visual Wake Words that are missing, damaged or contradict each other."""

import json

import pytest
from tiny_coco import FIRST_ID, ids

import snugfit._data.catalog as catalog
from snugfit._data import load
from snugfit.errors import DataError


def test_missing_set_says_whence(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "can_download", lambda: True)  # nothing is tried
    with pytest.raises(DataError, match=r"vww is not in .*looked for(.|\n)*cocodataset.org(.|\n)*--data-dir") as caught:
        load("vww", data_dir=tmp_path)
    assert str(caught.value).count("\n") <= 1


def test_other_half_of_the_annotations_is_missing(write_coco):
    root = write_coco()
    (root / "annotations" / "instances_train2014.json").unlink()
    with pytest.raises(DataError, match=r"instances_train2014.json is missing. Unpack annotations_trainval2014.zip"):
        load("vww", data_dir=root)


def test_image_folder_is_missing(write_coco):
    root = write_coco()
    (root / "val2014").rename(root / "validation")
    with pytest.raises(DataError, match=r"coco/val2014 is missing. Unpack val2014.zip"):
        load("vww", data_dir=root)


def test_image_is_missing(write_coco):
    root = write_coco()
    next((root / "train2014").glob("*0998.jpg")).unlink()
    with pytest.raises(
        DataError, match=r"train2014/COCO_train2014_0+998.jpg is missing, but .*train2014.json lists it"
    ):
        load("vww", data_dir=root)


def change(root, edit, part="train"):
    path = root / "annotations" / f"instances_{part}2014.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def no_person(content):
    content["categories"].pop()


def no_annotations(content):
    del content["annotations"]


def no_images(content):
    content["images"] = []


def unknown_image(content):
    content["annotations"][3]["image_id"] = 77


def image_twice(content):
    content["images"][3]["id"] = 999


def no_width(content):
    del content["images"][2]["width"]


def flat_image(content):
    content["images"][2]["height"] = 0


def no_area(content):
    del content["annotations"][2]["area"]


def area_in_words(content):
    content["annotations"][2]["area"] = "large"


def area_is_no_number(content):
    content["annotations"][2]["area"] = float("nan")


def id_with_fraction(content):
    content["images"][2]["id"] = 2.5


def huge_id(content):
    content["annotations"][2]["image_id"] = 1 << 70


def name_is_a_number(content):
    content["images"][2]["file_name"] = 12


def no_entry(content):
    content["categories"][0] = 3


def category_id_in_words(content):
    content["categories"][1]["id"] = "1"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (no_person, "has no category 'person'"),
        (no_annotations, "has no annotations"),
        (no_images, "has no images"),
        (unknown_image, "annotates an image 77 that it does not list"),
        (image_twice, "image 999 is listed twice"),
        (no_width, "'images' holds {.*, which is not an entry of COCO"),
        (flat_image, "'images' holds {.*, which is not an entry of COCO"),
        (name_is_a_number, "'images' holds {.*, which is not an entry of COCO"),
        (id_with_fraction, "'images' holds {.*, which is not an entry of COCO"),
        (no_area, "'annotations' holds {.*, which is not an entry of COCO"),
        (area_in_words, "'annotations' holds {.*, which is not an entry of COCO"),
        (area_is_no_number, "'annotations' holds {.*, which is not an entry of COCO"),
        (huge_id, "'annotations' holds {.*, which is not an entry of COCO"),
        (category_id_in_words, "'categories' holds {.*, which is not an entry of COCO"),
        (no_entry, "'categories' holds 3, which is not an entry of COCO"),
    ],
)
def test_wrong_content(write_coco, edit, message):
    root = write_coco()
    change(root, edit)
    with pytest.raises(DataError, match=rf"instances_train2014.json.*{message}.*\. .+") as caught:
        load("vww", data_dir=root)
    assert len(str(caught.value)) < 500


def test_an_image_in_both_parts_would_be_trained_and_tested_on(write_coco):
    root = write_coco()

    def shared_image(content):
        content["images"][2]["id"] = FIRST_ID["train"]

    change(root, shared_image, "val")
    with pytest.raises(DataError, match=r"annotations: image 1000 is listed twice"):
        load("vww", data_dir=root)


@pytest.mark.parametrize("keep", [0, 1, 30, 400, -1])
def test_truncated_json(write_coco, keep):
    path = write_coco() / "annotations" / "instances_val2014.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"instances_val2014.json .*character [\d,]+.*Restore it"):
        load("vww", data_dir=path.parents[2])


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04\xff", b"[]", b'{"a" [{}]}', b'{"a": [{"id": 1} {}]}', b'{"a": [01]}', b'{"a": 1, }',
        b'{"a": ' + b"[" * 100_000, b"{} {}", b'{"a": 1}"',
    ],
)  # fmt: skip
def test_file_that_is_no_json_object(write_coco, content):
    path = write_coco() / "annotations" / "instances_val2014.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"instances_val2014.json .*Restore it"):
        load("vww", data_dir=path.parents[2])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ids("val", 0) + "77\n", "lists image 77, which neither"),
        (
            ids("val", 0) + "COCO_val2014_000000000020.jpg\n",
            "line 2: 'COCO_val2014_000000000020.jpg' is not an image id",
        ),
        ("\n", "lists no images"),
        (ids("val", *range(4)) + ids("train", *range(10)), "leaves no images to train on"),
        ("\xff", "cannot be read: 'utf-8' codec"),
    ],
)
def test_wrong_list(write_coco, content, message):
    root = write_coco()
    (root / "annotations" / "mscoco_minival_ids.txt").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=rf"mscoco_minival_ids.txt.* {message}.*\. .+"):
        load("vww", data_dir=root)
