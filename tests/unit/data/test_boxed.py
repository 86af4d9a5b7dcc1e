"""Images with boxes: formats, division, batches, and boxes that follow augmentation."""

import colorsys

import numpy as np
import pytest
import tiny_boxes
import torch
from PIL import Image

from snugfit._data import BoxedBatches, Transform, boxed, load_boxed
from snugfit._data.boxed import BoxTransform, cropped, mirrored, recoloured

PLAIN = Transform((0.0,) * 3, (1.0,) * 3, flip=True)
WHITE = 255


def expected(seeds, size=64):
    return [[tiny_boxes.fractions(box, size, size) for box in tiny_boxes.picture(seed, size)[1]] for seed in seeds]


def boxes_of(part):
    targets = part.targets(np.arange(len(part)))
    return [[tuple(row.tolist()) for row in image if row[0] >= 0] for image in targets]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert sorted(one) == [pytest.approx(row, abs=1e-5) for row in sorted(other)]


def test_ultralytics_layout(tmp_path):
    root = tiny_boxes.write_yolo(tmp_path / "set", (("train", 5), ("val", 3), ("test", 2)))
    splits = load_boxed(str(root), image_size=32)
    assert splits.class_names == ("red", "blue") and splits.image_shape == (3, 32, 32)
    for part, seeds in ((splits.train, range(5)), (splits.val, range(5, 8)), (splits.test, range(8, 10))):
        assert_same(boxes_of(part), expected(seeds))
        assert part.images(np.arange(2)).shape == (2, 3, 32, 32)
    assert load_boxed(f"folder:{root}").image_shape == (3, 608, 608)
    assert load_boxed(str(root / "data.yaml"), image_size=32).class_names == ("red", "blue")
    assert load_boxed("set", data_dir=tmp_path, image_size=32).class_names == ("red", "blue")


def test_roboflow_layout(tmp_path):
    """``train/images`` beside ``train/labels``, named one folder too high in data.yaml, and ``valid``."""
    flat = tiny_boxes.write_yolo(tmp_path / "flat", (("train", 4), ("val", 2)))
    root = tmp_path / "set"
    for part, name in (("train", "train"), ("val", "valid")):
        for kind in ("images", "labels"):
            (root / name).mkdir(parents=True, exist_ok=True)
            (flat / kind / part).rename(root / name / kind)
    found = load_boxed(str(root), image_size=32)
    assert_same(boxes_of(found.val), expected((4, 5)))
    (root / "data.yaml").write_text("train: ../train/images\nval: ../valid/images\nnc: 2\nnames: [red, blue]\n")
    named = load_boxed(str(root), image_size=32)
    assert named.class_names == ("red", "blue")
    assert_same(boxes_of(named.val), expected((4, 5)))


def test_a_list_of_images_and_names_without_data_yaml(tmp_path):
    root = tiny_boxes.write_yolo(tmp_path / "set", (("train", 4), ("val", 2)))
    (root / "train.txt").write_text("./images/train/0001.png\n./images/train/0003.png\n")
    (root / "data.yaml").write_text("path: .\ntrain: train.txt\nval: [images/val]\nnames: [red, blue]\n")
    splits = load_boxed(str(root), image_size=32)
    assert_same(boxes_of(splits.train), expected((1, 3)))
    (root / "data.yaml").unlink()
    assert load_boxed(str(root), image_size=32).class_names == ("0", "1")
    (root / "classes.txt").write_text("rot\nblau\n")
    assert load_boxed(str(root), image_size=32).class_names == ("rot", "blau")


def test_images_alone_are_divided_by_the_seed(tmp_path):
    root = tiny_boxes.write_yolo(tmp_path / "set", (("", 20),))
    one, same, other = (load_boxed(str(root), image_size=32, seed=seed) for seed in (0, 0, 1))
    names = [{part.files[i].name for i in range(len(part))} for part in (one.train, one.val)]
    assert len(names[0]) == 18 and len(names[1]) == 2 and not names[0] & names[1]
    assert one.test is None
    assert_same(boxes_of(same.val), boxes_of(one.val))
    assert boxes_of(other.val) != boxes_of(one.val)
    few = load_boxed(str(root), image_size=32, max_train=5, max_val=1)
    assert (len(few.train), len(few.val)) == (5, 1)


def test_outlines_become_boxes_and_labels_upright_images(tmp_path):
    root = tiny_boxes.write_yolo(tmp_path / "set", (("", 3),))
    (root / "labels" / "0000.txt").write_text("1 0.1 0.2 0.5 0.3 0.3 0.8\n\n")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned: stored 20 wide and 40 high, shown 40 wide and 20 high
    Image.new("RGB", (20, 40), (9, 9, 9)).save(root / "images" / "0000.jpg", exif=exif)
    (root / "images" / "0000.png").unlink()
    splits = load_boxed(str(root), image_size=16, val_fraction=0.34)
    found = [row for part in (splits.train, splits.val) for image in boxes_of(part) for row in image]
    assert any(row == pytest.approx((1, 0.3, 0.5, 0.4, 0.6), abs=1e-6) for row in found)


def test_images_are_resized_without_cropping(tmp_path):
    """A white box in a wide image stays where its fractions say."""
    root = tmp_path / "set"
    for kind in ("images", "labels"):
        (root / kind).mkdir(parents=True)
    for number in range(3):
        image = Image.new("RGB", (120, 40))
        image.paste((WHITE,) * 3, (90, 10, 120, 30))
        image.save(root / "images" / f"{number}.png")
        (root / "labels" / f"{number}.txt").write_text("0 0.875 0.5 0.25 0.5\n")
    splits = load_boxed(str(root), image_size=40)
    seen = splits.train.images(np.array([0]))[0, 0].numpy() > WHITE // 2
    assert (np.flatnonzero(seen.any(0)).tolist(), np.flatnonzero(seen.any(1)).tolist()) == (
        list(range(30, 40)), list(range(10, 30)),
    )  # fmt: skip


def test_coco_layouts(tmp_path):
    root = tiny_boxes.write_coco(tmp_path / "coco")
    splits = load_boxed(str(root), image_size=32)
    assert splits.class_names == ("red", "blue"), "in the order of their ids"
    assert_same(boxes_of(splits.train), expected(range(6)))
    assert_same(boxes_of(splits.val), expected(range(6, 9)))
    alone = load_boxed(str(root / "annotations" / "instances_train2017.json"), image_size=32, val_fraction=0.34)
    assert (len(alone.train), len(alone.val)) == (4, 2)
    (root / "images").mkdir()
    for part in ("train2017", "val2017"):
        (root / part).rename(root / "images" / part)
    assert_same(boxes_of(load_boxed(str(root), image_size=32).train), expected(range(6)))
    roboflow = tmp_path / "roboflow"
    roboflow.mkdir()
    for part, name in (("train2017", "train"), ("val2017", "valid")):
        (root / "images" / part).rename(roboflow / name)
        (root / "annotations" / f"instances_{part}.json").rename(roboflow / name / "_annotations.coco.json")
    assert_same(boxes_of(load_boxed(str(roboflow), image_size=32).val), expected(range(6, 9)))


def test_batches_are_padded_alike_and_do_not_depend_on_the_batch_size(tmp_path):
    root = tiny_boxes.write_yolo(tmp_path / "set", (("train", 7), ("val", 2)))
    splits = load_boxed(str(root), image_size=64)
    batches = BoxedBatches(splits.train, PLAIN, seed=3, augment=True)
    whole = next(iter(batches.epoch(2, 7)))
    assert whole[0].shape == (7, 3, 64, 64) and whole[1].shape == (7, splits.train.most, 5)
    assert splits.val.most == splits.train.most
    parts = list(batches.epoch(2, 2))
    torch.testing.assert_close(torch.cat([images for images, _ in parts]), whole[0][:6])
    torch.testing.assert_close(torch.cat([targets for _, targets in parts]), whole[1][:6])
    again = list(batches.epoch(2, 2, start_step=2))
    torch.testing.assert_close(again[0][0], parts[2][0])
    images, targets = next(iter(batches.in_order(7)))
    torch.testing.assert_close(targets.numpy(), splits.train.targets(np.arange(7)))
    assert images.is_contiguous(memory_format=torch.channels_last)


def rectangles(count, size=64):
    """Black images with one white rectangle each, and their targets, padded by one row."""
    rng = np.random.default_rng(0)
    images, targets = torch.zeros(count, 3, size, size, dtype=torch.uint8), np.full((count, 2, 5), 0, dtype=np.float32)
    targets[:, 1, 0] = -1
    for place in range(count):
        width, height = rng.integers(10, 30, 2)
        left, top = rng.integers(0, size - width), rng.integers(0, size - height)
        images[place, :, top : top + height, left : left + width] = WHITE
        targets[place, 0] = tiny_boxes.fractions((0, left, top, width, height), size, size)
    return images, targets


def assert_box_is_where_the_white_is(images, targets, size=64):
    for image, rows in zip(images, targets, strict=True):
        white = image[0].float() > WHITE / 2
        across, down = (np.flatnonzero(white.any(dim).numpy()) for dim in (0, 1))
        x, y, width, height = (rows[0][1:] * size).tolist()
        found = (across[0], across[-1] + 1, down[0], down[-1] + 1)
        assert found == pytest.approx((x - width / 2, x + width / 2, y - height / 2, y + height / 2), abs=1.5)
        assert tuple(rows[1]) == (-1, 0, 0, 0, 0)


def test_boxes_follow_mirror_images():
    images, targets = rectangles(8)
    turned = mirrored(images, targets, np.arange(8) % 2 == 0)
    assert_box_is_where_the_white_is(turned, targets)
    assert torch.equal(turned[0], images[0].flip(-1)) and torch.equal(turned[1], images[1])


def test_boxes_follow_crops():
    images, targets = rectangles(30)
    cut = cropped(images, targets, np.random.default_rng(1).random((30, 4)))
    kept = targets[:, 0, 0] >= 0
    assert kept.sum() >= 25
    assert_box_is_where_the_white_is(cut[kept], targets[kept])
    assert (targets[~kept] == [-1, 0, 0, 0, 0]).all()


def test_a_box_that_is_cropped_away_is_padding():
    images, targets = rectangles(1)
    targets[0, 0] = [1, 0.05, 0.5, 0.1, 0.1]
    cropped(images, targets, np.array([[0.9, 0.0, 0.0, 0.0]]))
    assert targets[0, 0].tolist() == [-1, 0, 0, 0, 0]


def test_boxes_follow_everything_together():
    images, targets = rectangles(20)
    transform = BoxTransform(PLAIN)
    seen, moved = transform(images, targets, True, (1, 2), 0)
    kept = moved[:, 0, 0] >= 0
    assert kept.sum() >= 15
    assert_box_is_where_the_white_is(seen[kept] * WHITE, moved[kept])
    part, rest = transform(images[5:9], targets[5:9], True, (1, 2), 5)
    torch.testing.assert_close(part, seen[5:9])
    torch.testing.assert_close(rest, moved[5:9])
    assert targets[0, 0, 0] == 0, "the targets given stay as they are"


def test_colours_change_and_shapes_do_not():
    images = torch.rand(4, 3, 8, 8)
    draws = np.random.default_rng(0).random((4, 5))
    changed = recoloured(images, draws)
    assert changed.min() >= 0 and changed.max() <= 1
    assert (changed - images).abs().max() > 0.05
    still = np.array([[0.5, 0.0, 0.0, 0.0, 0.0]] * 4)
    torch.testing.assert_close(recoloured(images, still), images, atol=1e-5, rtol=0)
    grey = recoloured(images[:, :1], np.array([[0.0, 0.0, 0.0, 1.0, 0.0]] * 4))
    torch.testing.assert_close(grey, (images[:, :1] * 1.5).clamp(max=1))


def test_colours_change_as_in_the_standard_library():
    images = torch.rand(6, 3, 5, 5)
    images[0] = images[0, :1]  # grey
    images[1], images[2] = 0, 1
    images[3] = (images[3] * 2).round()  # the corners of the cube: channels are equal
    draws = np.random.default_rng(2).random((6, 5))
    changed = recoloured(images, draws).permute(0, 2, 3, 1)
    for image, result, (hue, by, down, bright, dark) in zip(images.permute(0, 2, 3, 1), changed, draws, strict=True):
        factors = [1 + 0.5 * each for each in (by, bright)]
        saturation, exposure = (1 / f if up >= 0.5 else f for f, up in zip(factors, (down, dark), strict=True))
        for pixel, got in zip(image.reshape(-1, 3).tolist(), result.reshape(-1, 3).tolist(), strict=True):
            h, s, v = colorsys.rgb_to_hsv(*pixel)
            want = colorsys.hsv_to_rgb((h + (2 * hue - 1) * 0.1) % 1, min(s * saturation, 1), min(v * exposure, 1))
            assert got == pytest.approx(want, abs=1e-5)


def test_large_images_are_coloured_in_parts(monkeypatch):
    images, targets = rectangles(3)
    images = images // 2 + torch.randint(0, 99, images.shape, dtype=torch.uint8)
    transform = BoxTransform(PLAIN)
    whole, _ = transform(images, targets, True, (1, 2), 0)
    monkeypatch.setattr(boxed, "_CHUNK_VALUES", 1000)
    parts, _ = transform(images, targets, True, (1, 2), 0)
    torch.testing.assert_close(parts, whole)
