"""Folders with links and special files: each real file once, and nothing that is no file."""

import os
import re
import threading
from pathlib import Path

import pytest
import tiny_boxes
from PIL import Image

from snugfit._data import load, load_boxed, read_folder
from snugfit._data.files import below
from snugfit.errors import DataError


def every_file(root, **options):
    names, sets = read_folder(str(root), image_size=8, workers=0, **options)
    return names, [[str(path.relative_to(root)) for path in images.parent.files] for images in sets]


def test_a_loop_in_a_class_folder_adds_nothing(write_folder):
    root = write_folder()
    before = every_file(root)
    (root / "ants" / "loop").symlink_to(".")
    (root / "bees" / "deep").mkdir()
    (root / "bees" / "deep" / "again").symlink_to(root / "bees")
    assert every_file(root) == before


@pytest.mark.parametrize("target", ["..", "../..", "/"])
def test_a_link_to_a_folder_above_adds_nothing(write_folder, target):
    root = write_folder()
    before = every_file(root)
    (root / "ants" / "up").symlink_to(target)
    assert every_file(root) == before


def test_two_names_of_a_file_in_a_class_count_once(write_folder):
    root = write_folder()
    (root / "ants" / "000a.jpg").symlink_to("000.jpg")
    (root / "ants" / "again").symlink_to(".")
    assert len(every_file(root)[1][0]) == 20


def test_links_out_of_the_data_set_are_followed(write_folder, tmp_path):
    root, store = write_folder(), tmp_path / "store"
    (root / "bees").rename(store)
    (root / "bees").symlink_to(store)
    other = tmp_path / "one.jpg"
    Image.new("RGB", (9, 9)).save(other)
    (root / "ants" / "x.jpg").symlink_to(other)
    names, (files,) = every_file(root)
    assert names == ("ants", "bees")
    assert files == [f"ants/{i:03d}.jpg" for i in range(10)] + ["ants/x.jpg"] + [f"bees/{i:03d}.jpg" for i in range(10)]


@pytest.mark.parametrize("link", ["ants/more", "more", "ants/one.jpg"])
def test_a_file_in_two_classes_is_refused(write_folder, link):
    root = write_folder()
    (root / link).symlink_to(root / ("bees/003.jpg" if link.endswith("jpg") else "bees"))
    with pytest.raises(DataError, match=r"are one file, through a link. Keep it in one class of one split"):
        load(f"folder:{root}", image_size=8)


def test_a_class_that_links_to_the_whole_is_refused(write_folder):
    root = write_folder()
    (root / "cats").symlink_to(".")
    with pytest.raises(DataError, match="are one file, through a link"):
        load(f"folder:{root}", image_size=8)


def test_a_file_in_two_splits_is_refused(write_folder):
    root = write_folder(parts=("train",))
    (root / "val").symlink_to("train")
    with pytest.raises(DataError, match="are one file, through a link"):
        load(f"folder:{root}", image_size=8)


def test_hard_links_and_copies_are_files_of_their_own(write_folder):
    root = write_folder()
    os.link(root / "ants" / "000.jpg", root / "bees" / "900.jpg")
    assert len(every_file(root)[1][0]) == 21


def finishes(call):
    """Run a call that a defect may block for ever, without hanging the test."""
    outcome = []

    def run():
        try:
            call()
        except DataError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it hangs"
    return outcome[0]


def test_a_fifo_among_the_images_is_named(write_folder):
    root = write_folder()
    os.mkfifo(root / "bees" / "x.png")
    said = finishes(lambda: load(f"folder:{root}", image_size=8))
    assert "bees/x.png is not a regular file but a FIFO" in said


def test_a_link_to_nothing_is_named(write_folder):
    root = write_folder()
    (root / "bees" / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(DataError, match=r"gone\.png cannot be read: No such file"):
        load(f"folder:{root}", image_size=8)


@pytest.mark.parametrize("name", ["labels/train/0001.txt", "images/train/x.png", "data.yaml"])
def test_fifos_of_a_yolo_folder_are_named(tmp_path, name):
    root = tiny_boxes.write_yolo(tmp_path / "set", (("train", 4), ("val", 2)))
    (root / name).unlink(missing_ok=True)
    (root / "data.yaml").unlink(missing_ok=True)
    os.mkfifo(root / name)
    assert re.search("is (no|not a) regular file", finishes(lambda: load_boxed(str(root), image_size=32)))


def test_a_loop_in_a_yolo_folder_adds_nothing(tmp_path):
    root = tiny_boxes.write_yolo(tmp_path / "set", (("train", 4), ("val", 2)))
    (root / "images" / "train" / "loop").symlink_to(".")
    (root / "images" / "train" / "up").symlink_to("..")
    assert len(load_boxed(str(root), image_size=32).train) == 4


def test_an_image_in_two_parts_of_a_yolo_folder_is_refused(tmp_path):
    root = tiny_boxes.write_yolo(tmp_path / "set", (("train", 4), ("val", 2)))
    (root / "images" / "val" / "leak.png").symlink_to(root / "images" / "train" / "0000.png")
    with pytest.raises(DataError, match="are one file, through a link"):
        load_boxed(str(root), image_size=32)


@pytest.mark.parametrize("name", ["../outside.png", "/etc/hostname", "a/../../b.png", "", "x\0y", "x" * 2000])
def test_a_list_names_no_file_outside_its_folder(tmp_path, name):
    with pytest.raises(DataError, match=r"list, line 3: .* is not a file below"):
        below(tmp_path, name, "list, line 3")


@pytest.mark.parametrize("name", [b"b\xff", b"a\nb", b"\x1b[2Jx"])
def test_a_class_name_that_no_report_can_hold_is_refused(write_folder, name):
    root = write_folder()
    (root / "bees").rename(root / os.fsdecode(name))
    with pytest.raises(DataError, match=r"the class name '.*' is not UTF-8 or holds control characters") as caught:
        load(f"folder:{root}", image_size=8)
    assert str(caught.value).isascii() and "\n" not in str(caught.value)


def test_file_names_need_not_be_utf8(write_folder):
    root = write_folder()
    (root / "bees" / "000.jpg").rename(root / "bees" / os.fsdecode(b"\xff\xfe.jpg"))
    splits = load(f"folder:{root}", image_size=8)
    assert len(splits.train.parent) == 20 and splits.train.images(range(16)).shape[0] == 16


def test_what_may_not_be_read_is_named(write_folder, monkeypatch):
    root, iterate = write_folder(), Path.iterdir

    def refused(path):
        if path.name == "bees":
            raise PermissionError(13, "Permission denied", str(path))
        return iterate(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(DataError, match=r"photos/bees cannot be read: Permission denied\. Correct or remove it"):
        load(f"folder:{root}", image_size=8)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/x"])
@pytest.mark.parametrize(
    "open_it", [lambda name: load(f"folder:{name}"), load_boxed, lambda name: load("mnist", data_dir=name)]
)
def test_paths_that_no_system_takes(name, open_it):
    with pytest.raises(DataError):
        open_it(name)
