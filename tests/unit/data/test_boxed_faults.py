"""Images with boxes that are wrong: one clear error, or a counted line."""

import json

import pytest
import tiny_boxes
from PIL import Image

from snugfit._data import load_boxed
from snugfit.errors import DataError, UsageError


@pytest.fixture
def folder(tmp_path):
    return tiny_boxes.write_yolo(tmp_path / "set", (("train", 4), ("val", 2)))


def label(folder, text, name="0000"):
    (folder / "labels" / "train" / f"{name}.txt").write_text(text)


def refuse(folder, match, **options):
    with pytest.raises(DataError, match=match) as caught:
        load_boxed(str(folder), image_size=32, **options)
    assert str(caught.value).count("\n") <= 1
    return caught.value


def notes(folder):
    return " | ".join(load_boxed(str(folder), image_size=32).notes)


@pytest.mark.parametrize(
    "text", ["0 0.5 0.5 0.2", "red 0.5 0.5 0.2 0.2", "0 0.5 0.5 0.2 x", "0.5 0.5 0.5 0.1 0.1", "-1 .5 .5 .1 .1"]
)
def test_a_malformed_line_is_named(folder, text):
    label(folder, f"0 0.5 0.5 0.2 0.2\n{text}\n")
    refuse(folder, r"labels/train/0000\.txt, line 2: .* is not a label. Write a class number")


@pytest.mark.parametrize(
    "box", ["320 200 50 60", "0.5 1.2 0.1 0.1", "-0.1 0.5 0.1 0.1", "nan 0.5 0.1 0.1", "0.5 0.5 30 0.1"]
)
def test_a_box_outside_the_image_is_an_error(folder, box):
    label(folder, f"0 {box}\n")
    refuse(folder, "lies outside the image. Give centre and size as fractions")


def test_a_class_without_a_name_is_an_error(folder):
    label(folder, "2 0.5 0.5 0.2 0.2\n")
    refuse(folder, r"line 1: there is no class 2; classes go from 0 to 1")


def test_a_corrupt_image_is_named(folder):
    (folder / "images" / "train" / "0001.png").write_bytes(b"no image at all")
    refuse(folder, r"cannot read the image .*0001\.png: not an image")


def test_a_truncated_image_is_named_when_it_is_read(folder):
    path = folder / "images" / "train" / "0001.png"
    path.write_bytes(path.read_bytes()[:2000])
    splits = load_boxed(str(folder), image_size=32)
    with pytest.raises(DataError, match=r"0001\.png"):
        splits.train.images([0, 1, 2, 3])


def test_no_boxes_at_all_is_an_error(folder):
    for file in (folder / "labels" / "train").iterdir():
        file.write_text("")
    refuse(folder, "hold no boxes to train on. Labels of images/a.jpg must be in labels/a.txt")


def test_no_images_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "holds no training images: looked for images/train")


def test_no_such_folder_is_an_error(tmp_path):
    refuse(tmp_path / "nowhere", "does not exist. Detection takes a folder")


def test_a_folder_that_data_yaml_names_must_be_there(folder):
    (folder / "data.yaml").write_text("train: images/trian\nval: images/val\nnames: [red, blue]\n")
    refuse(folder, "trian is missing, but data.yaml names it")


@pytest.mark.parametrize("text", ["{", "just words", "names: {1: red, 5: blue}\ntrain: images/train\n"])
def test_a_data_yaml_that_is_none(folder, text):
    (folder / "data.yaml").write_text(text)
    refuse(folder, "data.yaml")


def test_too_many_or_too_few(folder, tmp_path):
    refuse(folder, "has 2 classes, not 3", classes=3)
    refuse(tiny_boxes.write_yolo(tmp_path / "two", (("", 2),)), "too few to split off")
    with pytest.raises(UsageError, match="at least 1"):
        load_boxed(str(folder), max_train=0)


def test_boxes_that_reach_beyond_the_image_are_cut_off_and_counted(folder):
    label(folder, "0 0.1 0.5 0.4 0.2\n")
    splits = load_boxed(str(folder), image_size=32)
    assert splits.train.targets([0])[0, 0].tolist() == pytest.approx([0, 0.15, 0.5, 0.3, 0.2])
    assert "1 boxes reach beyond their image and were cut off" in splits.notes[0]


def test_empty_and_repeated_boxes_are_left_out_and_counted(folder):
    label(folder, "0 0.5 0.5 0 0.2\n1 0.5 0.5 0.2 0.2\n1 0.5 0.5 0.2 0.2\n1 0.5 0.5 0.2 0.2\n")
    said = notes(folder)
    assert "1 boxes without width or height" in said and "2 boxes are listed twice" in said
    assert load_boxed(str(folder), image_size=32).train.boxes.counts[0] == 1


def test_images_without_labels_and_labels_without_images_are_counted(folder):
    (folder / "labels" / "train" / "0001.txt").unlink()
    (folder / "images" / "train" / "0002.png").unlink()
    said = notes(folder)
    assert "1 images have no file of labels and count as images without objects" in said
    assert "1 files of labels have no image and were left out" in said
    assert str(folder) in said


def test_good_data_has_nothing_to_tell(folder):
    assert notes(folder) == ""


def edit(root, change):
    path = root / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), "'annotations' holds .* which is not an entry of COCO"),
        (lambda c: c["annotations"][0].update(category_id=9), "category 9, which it does not list"),
        (lambda c: c["annotations"][0].update(image_id=1), "annotates an image 1 that it does not list"),
        (lambda c: c["annotations"][0].update(bbox=[900, 2, 3, 4]), "image 10. lies outside the image|lies outside"),
        (lambda c: c["images"].append(c["images"][0]), "is listed twice"),
        (lambda c: c["images"][0].update(file_name="gone.png"), "gone.png is missing"),
        (lambda c: c["images"][0].update(width=0), "'images' holds"),
        (lambda c: c.update(categories=[]), "has no categories"),
        (lambda c: c.update(images=[]), "has no images"),
        (lambda c: c.update(annotations=[]), "holds no boxes to train on"),
        (lambda c: c["categories"].append({"id": 9, "name": "green"}), "has other categories than"),
    ],
)  # fmt: skip
def test_damaged_coco(tmp_path, change, match):
    root = tiny_boxes.write_coco(tmp_path / "coco")
    edit(root, change)
    refuse(root, match)


def test_coco_without_its_training_part(tmp_path):
    root = tiny_boxes.write_coco(tmp_path / "coco")
    (root / "annotations" / "instances_train2017.json").unlink()
    refuse(root, "instances_train.*json is missing, but there are val annotations")


def test_crowds_are_left_out_and_counted(tmp_path):
    root = tiny_boxes.write_coco(tmp_path / "coco")
    before = len(load_boxed(str(root), image_size=32).train.boxes.rows)
    edit(root, lambda content: content["annotations"][0].update(iscrowd=1))
    splits = load_boxed(str(root), image_size=32)
    assert len(splits.train.boxes.rows) == before - 1
    assert "1 crowds were left out" in splits.notes[0]


def test_the_first_picture_is_what_it_should_be():
    """The other tests rest on it."""
    pixels, boxes = tiny_boxes.picture(0)
    label_of, left, top, width, height = boxes[-1]  # drawn last
    assert Image.fromarray(pixels).getpixel((left + width // 2, top + height // 2)) == tiny_boxes.COLOURS[label_of]


@pytest.mark.parametrize("label_of", ["3000000000", "1e300", "99999999999999999999"])
def test_a_class_number_beyond_all_sense_is_an_error(tmp_path, label_of):
    """It used to make a name for every class up to it, which takes all memory."""
    root = tiny_boxes.write_yolo(tmp_path / "set", (("", 4),))
    (root / "labels" / "0000.txt").write_text(f"{label_of} 0.5 0.5 0.2 0.2\n")
    refuse(root, r"0000\.txt, line 1: .* classes are more than 100,000")


@pytest.mark.parametrize("label_of", ["nan", "inf", "-inf"])
def test_a_class_that_is_no_number_is_an_error(folder, label_of):
    label(folder, f"{label_of} 0.5 0.5 0.2 0.2\n")
    refuse(folder, r"0000\.txt, line 1: .* is not a label")


def test_a_file_name_of_coco_leads_out_of_no_folder(tmp_path):
    root = tiny_boxes.write_coco(tmp_path / "coco")
    Image.new("RGB", (64, 64)).save(tmp_path / "outside.png")
    edit(root, lambda content: content["images"][0].update(file_name="../../outside.png"))
    refuse(root, r"instances_train2017.json: '../../outside.png' is not a file below")
    edit(root, lambda content: content["images"][0].update(file_name=str(tmp_path / "outside.png")))
    refuse(root, "is not a file below")


def test_a_label_file_without_end_is_an_error(folder, monkeypatch):
    monkeypatch.setattr("snugfit._data.yolo.LARGEST_LABELS", 1000)
    label(folder, "0 0.5 0.5 0.2 0.2\n" * 100)
    refuse(folder, "has 1,800 bytes; at most 1,000 are read")
    monkeypatch.setattr("snugfit._data.files.LONGEST_LINE", 50)
    label(folder, "0 0.5 0.5 0.2 0.2" + " 0.5" * 100)
    refuse(folder, "has a line of over 50 characters")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{one}: &{one} [{', '.join([f'*{other}'] * 9)}]\n" for one, other in zip("bcdefghi", "abcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ("nc: 99999999999", r"data\.yaml: nc, the number of classes, is 99999999999, not from 1 to 100,000"),
        ("nc: 0", "nc, the number of classes, is 0"),
        ("nc: '2'", "nc, the number of classes, is '2'"),
        ("nc: true", "nc, the number of classes, is True"),
        ("nc: .nan", "no finite number"),
        ("names: 7", "names are 7, not a list of names"),
        ("names: [[red], blue]", "names are .*, not a list of names"),
        ("names: {red: 0, blue: 1}", "names must be numbered from 0 to 1"),
        ("names: [red, blue]\nval: 7", "7 is not a folder or list of images"),
        ("names: [red, blue]\nval: [{a: b}]", "is not a folder or list of images"),
        ("names: [red, blue]\npath: [a, b]", "is not a folder or list of images"),
        (BOMB + "names: [*i]", "more than 200,000 values"),
        ("names: " + "[" * 5000, "is nested more than"),
        ("names: !!python/object/apply:os.system [echo]", "is not valid YAML"),
        ('names: ["a\\nb", b]', "control characters"),
        ("names: [a, b]\nval: ~nobody-of-this-name/x", "begins with ~ and a name that no user has"),
        ("names: [a, b]\nval: " + "x" * 5000, "is not a name of a file or folder"),
        ("names: [a, b]\nval: " + "x" * 500, "cannot be read: File name too long"),
    ],
    ids=lambda value: value[:30],
)
def test_a_data_yaml_that_is_hostile(folder, settings, match):
    kept = "" if "val:" in settings else "val: images/val\n"
    (folder / "data.yaml").write_text(f"train: images/train\n{kept}{settings}\n")
    refuse(folder, match)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["images"][0].update(width=[1], height=10**11),
        lambda c: c["images"][0].update(width=float("nan")),
        lambda c: c["images"][0].update(width=10**400),
        lambda c: c["images"][0].update(id=True),
        lambda c: c["images"][0].update(id=2**70),
        lambda c: c["images"][0].update(file_name=["a"]),
        lambda c: c["images"][0].update(file_name="\ud800.png"),
        lambda c: c["images"].insert(0, ["a"]),
        lambda c: c["images"].insert(0, "a"),
        lambda c: c["annotations"][0].update(bbox=[float("nan")] * 4),
        lambda c: c["annotations"][0].update(bbox="1234"),
        lambda c: c["annotations"][0].update(category_id=1.5),
        lambda c: c["annotations"].insert(0, None),
        lambda c: c["categories"][0].update(name="\ud800"),
        lambda c: c["categories"][0].update(name={"a": 1}),
        lambda c: c["categories"][0].update(id="1"),
    ],
)
def test_coco_of_wrong_types(tmp_path, change):
    root = tiny_boxes.write_coco(tmp_path / "coco")
    edit(root, change)
    assert refuse(root, r"which is not an entry of COCO").args[0].isascii()


def test_a_coco_file_without_end_is_an_error(tmp_path):
    root = tiny_boxes.write_coco(tmp_path / "coco")
    path = root / "annotations" / "instances_train2017.json"
    path.write_text('{"images": ' + "[" * 100_000)
    refuse(root, "cannot be read as JSON")
    path.write_text('{"info": ' + '{"a": ' * 100_000)
    refuse(root, "cannot be read as JSON")


def test_more_boxes_than_an_image_can_have(folder, monkeypatch):
    monkeypatch.setattr("snugfit._data.boxes.MOST_BOXES", 3)
    label(folder, "".join(f"0 0.5 0.5 0.2 0.{i}\n" for i in range(1, 6)))
    refuse(folder, r"0000\.txt: 5 boxes are more than 3 in one image")
