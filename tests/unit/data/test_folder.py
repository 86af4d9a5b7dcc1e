"""Image folders and ImageNet layouts: parts, decoding, and what can be wrong with a photo."""

import numpy as np
import pytest
import torch
from PIL import Image

from snugfit._data import Decoder, load
from snugfit._data.decode import decode
from snugfit.errors import DataError, UsageError


def load_folder(root, **options):
    return load(f"folder:{root}", image_size=16, **options)


def test_classes_alone_are_divided_in_three(write_folder):
    splits = load_folder(write_folder(count=20))
    assert splits.class_names == ("ants", "bees") and splits.image_shape == (3, 16, 16)
    assert [np.bincount(part.labels).tolist() for part in (splits.train, splits.val, splits.test)] == [
        [16, 16], [2, 2], [2, 2],
    ]  # fmt: skip
    every = np.concatenate([part.indices for part in (splits.train, splits.val, splits.test)])
    assert np.array_equal(np.sort(every), np.arange(40))


@pytest.mark.parametrize("held_out", ["val", "valid", "test"])
def test_a_held_out_part_serves_as_test(write_folder, held_out):
    splits = load_folder(write_folder(parts=("train", held_out)))
    assert (len(splits.train), len(splits.val), len(splits.test)) == (18, 2, 20)
    files = [{str(p.parent.files[int(i)]) for i in p.indices} for p in (splits.train, splits.val)]
    assert not files[0] & files[1] and all("/train/" in name for part in files for name in part)
    assert all(f"/{held_out}/" in str(splits.test.files[i]) for i in range(20))


def test_three_parts_are_used_as_they_are(write_folder):
    splits = load_folder(write_folder(parts=("train", "val", "test")))
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [20, 20, 20]
    assert "/val/" in str(splits.val.files[0]) and "/test/" in str(splits.test.files[0])


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "bmp", "JPEG"])
@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_and_labels_agree(write_folder, extension, workers):
    splits = load_folder(write_folder(extension=extension), workers=workers)
    images = splits.train.images(np.arange(len(splits.train)))
    assert images.dtype == torch.uint8 and images.shape == (16, 3, 16, 16)
    red = images[:, 0].float().mean((1, 2))
    assert np.array_equal((red > 30).numpy(), splits.train.labels == 1)
    splits.close()


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [(1, "auto", 2), (4, "auto", 4), (64, "auto", 8), (64, "3", 3), (1, np.int64(3), 3)],
)
def test_as_many_threads_decode_as_there_are_cores(write_folder, monkeypatch, cores, workers, threads):
    monkeypatch.setattr("snugfit._core.hardware.cores", lambda: cores)
    asked = []
    monkeypatch.setattr("snugfit._data.decode.ThreadPoolExecutor", lambda count, **_: asked.append(count))
    load_folder(write_folder(), workers=workers)
    assert asked == [threads]


@pytest.mark.parametrize("workers", ["many", -1, 2000])
def test_a_wrong_number_of_threads_is_named(write_folder, workers):
    with pytest.raises(UsageError, match="--workers must be auto or a whole number from 0 to 1,024"):
        load_folder(write_folder(), workers=workers)


def test_hidden_and_foreign_files_are_ignored(write_folder):
    root = write_folder()
    (root / ".git").mkdir()
    (root / "ants" / ".hidden.jpg").write_bytes(b"")
    (root / "ants" / "notes.txt").write_text("no image")
    splits = load_folder(root)
    assert splits.class_names == ("ants", "bees") and len(splits.train.parent) == 20


def test_resize_short_side_and_centre_crop(tmp_path):
    image = np.zeros((20, 60, 3), np.uint8)
    image[:, 20:40] = 255
    Image.fromarray(image).save(tmp_path / "wide.png")
    assert (np.asarray(decode(tmp_path / "wide.png", 10)) > 250).mean() > 0.75
    assert np.asarray(decode(tmp_path / "wide.png", 20)).min() == 255


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("extension", ["jpg", "png", "webp"])
def test_exif_rotation_is_honoured(tmp_path, orientation, extension):
    upright = Image.new("RGB", (64, 64))
    upright.paste((255, 255, 255), (0, 0, 32, 32))
    inverse = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = upright.transpose(inverse[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / f"photo.{extension}", exif=exif)
    got = np.asarray(decode(tmp_path / f"photo.{extension}", 64)).astype(int)[..., 0]
    assert np.abs(got - np.asarray(upright).astype(int)[..., 0])[8:56, 8:24].max() < 40
    assert got[4:28, 4:28].min() > 200 and got[36:60, :].max() < 60 and got[:, 36:60].max() < 60


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    extension = "jpg" if mode == "CMYK" else "png"
    if mode.startswith("I"):
        image = Image.fromarray(np.full((20, 20), 200 << 8, np.uint16))
    elif mode == "P":
        image = Image.new("RGB", (20, 20), (200, 200, 200)).quantize()
    else:
        image = Image.new("RGB", (20, 20), (200, 200, 200)).convert(mode)
    image.save(tmp_path / f"image.{extension}")
    got = np.asarray(decode(tmp_path / f"image.{extension}", 8)).astype(int)
    assert got.shape == (8, 8, 3)
    if mode != "1":
        assert np.abs(got - 200).max() <= 3


def test_decoder_can_give_grey(tmp_path):
    Image.new("RGB", (20, 20), (90, 90, 90)).save(tmp_path / "a.png")
    decoder = Decoder(8, channels=1, workers=1)
    assert torch.equal(decoder([tmp_path / "a.png"]), torch.full((1, 1, 8, 8), 90, dtype=torch.uint8))
    decoder.close()


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "bmp"])
@pytest.mark.parametrize("workers", [0, 2])
def test_truncated_image_is_named_when_read(write_folder, tmp_path, extension, workers):
    root = write_folder(count=10)
    for old in (root / "ants").iterdir():
        old.unlink()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for i in range(10):
        Image.fromarray(noise).save(root / "ants" / f"{i}.{extension}")
        truncate(root / "ants" / f"{i}.{extension}")
    with pytest.raises(DataError, match=rf"cannot read the image .*ants/\d\.{extension}: .+ Replace it .*or remove it"):
        splits = load_folder(root, workers=workers)
        splits.train.images(np.arange(16))


@pytest.mark.parametrize("content", [b"", b"hello, I am no image", b"\xff\xd8\xff\xe0\x40\x00garbage"])
def test_file_that_is_no_image_is_named_at_once(write_folder, content):
    root = write_folder()
    (root / "bees" / "bad.jpg").write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read the image .*bees/bad.jpg: .+"):
        load_folder(root)


def test_an_image_of_a_format_that_is_not_read_is_refused_and_not_left_out(write_folder):
    root = write_folder()
    Image.new("RGB", (4, 4)).save(root / "bees" / "scan.TIF", format="TIFF")
    with pytest.raises(DataError, match=r"bees/scan.TIF is of a format that is not read. Convert it to one of .bmp, "):
        load_folder(root)


def test_empty_class_folder(write_folder):
    root = write_folder()
    (root / "wasps").mkdir()
    with pytest.raises(DataError, match=r"wasps holds no images \(\.bmp, \.gif, \.jpeg, \.jpg, \.png, \.webp\)"):
        load_folder(root)


def test_single_class(write_folder):
    with pytest.raises(DataError, match=r"1 class folder\(s\); at least two"):
        load_folder(write_folder(classes=("ants",)))


def test_parts_with_different_classes(write_folder):
    root = write_folder(parts=("train", "val"))
    (root / "val" / "bees").rename(root / "val" / "wasps")
    with pytest.raises(DataError, match="different classes: only one of them has 'bees'"):
        load_folder(root)


def test_imagenette(write_folder, tmp_path):
    root = write_folder(parts=("train", "val"), classes=("n01440764", "n02102040"), extension="JPEG")
    root.rename(tmp_path / "imagenette2-160")
    splits = load("imagenette", data_dir=tmp_path)
    assert splits.class_names == ("tench", "English springer") and splits.image_shape == (3, 160, 160)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (18, 2, 20)


@pytest.fixture
def tiny_imagenet(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    wnids = ["n03", "n01"]
    for label, wnid in enumerate(wnids):
        folder = root / "train" / wnid / "images"
        folder.mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (64, 64), (100 * label, 0, 0)).save(folder / f"{wnid}_{i}.JPEG")
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for i in range(6):
        Image.new("RGB", (64, 64), (100 * (i % 2), 0, 0)).save(root / "val" / "images" / f"val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{wnids[i % 2]}\t0\t0\t62\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    return root


def test_tiny_imagenet(tiny_imagenet):
    splits = load("tiny-imagenet", data_dir=tiny_imagenet.parent)
    assert splits.class_names == ("n01", "n03") and splits.image_shape == (3, 64, 64)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (18, 2, 6)
    for part in (splits.train, splits.test):
        red = part.images(np.arange(len(part)))[:, 0].float().mean((1, 2))
        assert np.array_equal((red > 50).numpy(), part.labels == 0)


def test_tiny_imagenet_annotation_of_unknown_class(tiny_imagenet):
    with (tiny_imagenet / "val" / "val_annotations.txt").open("a") as file:
        file.write("val_9.JPEG\tn99\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match=r"val_annotations.txt, line 7"):
        load("tiny-imagenet", data_dir=tiny_imagenet.parent)
