"""The good files that fuzzing begins with: ``python -m benchmarks.fuzz.good`` writes them into the corpus anew."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.fuzz import good_runs
from benchmarks.fuzz.hunt import CORPUS

_CLASSES = ("ants", "bees")
_RNG = np.random.default_rng(0)


def _image(path: Path, label: int = 0, mode: str = "RGB", side: int = 10, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((side, side + 2, 3), (90 * label, 40, 200), dtype=np.uint8)
    pixels[2:6, 2:6] = _RNG.integers(0, 256, (4, 4, 3))
    Image.fromarray(pixels).convert(mode).save(path, **options)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _folder(root: Path) -> None:
    for label, name in enumerate(_CLASSES):
        for index, suffix in enumerate(("jpg", "png", "webp", "JPEG")):
            _image(root / name / f"{index}.{suffix}", label)


def _labels(root: Path) -> None:
    labels = ("ants", "bees", "ants;bees", "", "bees", "ants")
    for index in range(len(labels)):
        _image(root / "photos" / f"{index}.jpg", index)
    lines = [f"photos/{index}.jpg,{each}" for index, each in enumerate(labels)]
    _text(root / "labels.csv", "\n".join(["file,labels", *lines, ""]))


def _labels_columns(root: Path) -> None:
    for part in ("train", "val", "test"):
        for index in range(3):
            _image(root / part / f"{index}.png", index)
        _text(root / part / "labels.csv", "file,ants,bees\n0.png,1,0\n1.png,1,1\n2.png,0,0\n")


def _images(root: Path) -> None:
    root.mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "an image"
    _image(root / "turned.jpg", exif=exif)
    _image(root / "progressive.jpg", progressive=True)
    _image(root / "grey.jpg", mode="L")
    _image(root / "cmyk.jpg", mode="CMYK")
    for mode in ("RGB", "RGBA", "P", "L", "1", "LA"):
        _image(root / f"{mode}.png", mode=mode)
    Image.fromarray(np.full((9, 9), 200 << 8, np.uint16)).save(root / "deep.png")
    _image(root / "lossy.webp")
    _image(root / "lossless.webp", lossless=True, exif=exif)
    frames = [Image.new("RGB", (9, 9), (60 * i, 9, 9)) for i in range(3)]
    for suffix in ("gif", "webp"):
        frames[0].save(root / f"moving.{suffix}", save_all=True, append_images=frames[1:])
    _image(root / "plain.bmp")


def _yolo(root: Path) -> None:
    for part, count in (("train", 3), ("val", 2)):
        for index in range(count):
            _image(root / "images" / part / f"{index}.png")
            _text(root / "labels" / part / f"{index}.txt", f"{index % 2} 0.5 0.5 0.25 0.3\n0 .2 .2 .3 .2 .3 .4 .1 .3\n")
    _text(root / "data.yaml", "path: .\ntrain: images/train\nval: images/val\nnames:\n  0: red\n  1: blue\nnc: 2\n")


def _yolo_lists(root: Path) -> None:
    _yolo(root)
    _text(root / "train.txt", "".join(f"images/train/{i}.png\n" for i in range(3)))
    _text(root / "data.yaml", "train: train.txt\nval: [images/val]\nnc: 3\n")


def _coco_json(names: list[str], first: int) -> str:
    images = [{"id": first + i, "file_name": name, "width": 12, "height": 10} for i, name in enumerate(names)]
    boxes = [
        {"id": i, "image_id": first + i, "category_id": 1 + i % 2, "bbox": [2, 2, 4, 4.5], "area": 16.0, "iscrowd": 0}
        for i in range(len(names))
    ]
    categories = [{"id": 1, "name": "person"}, {"id": 2, "name": "dog"}]
    return json.dumps({"info": {"year": 2017}, "images": images, "annotations": boxes, "categories": categories})


def _coco(root: Path, year: int = 2017) -> None:
    for part, count, first in (("train", 4, 100), ("val", 2, 7)):
        names = [f"{part}{i}.jpg" for i in range(count)]
        for name in names:
            _image(root / f"{part}{year}" / name)
        _text(root / "annotations" / f"instances_{part}{year}.json", _coco_json(names, first))


def _vww(root: Path) -> None:
    _coco(root / "coco", 2014)
    _text(root / "coco" / "annotations" / "mscoco_minival_ids.txt", "7\n8\n")


def _idx(packed: bool) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        folder = root / "mnist"
        folder.mkdir(parents=True)
        for prefix in ("train", "t10k"):
            pixels = _RNG.integers(0, 256, (8, 4, 4), dtype=np.uint8)
            labels = np.arange(8, dtype=np.uint8) % 2
            for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
                data = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
                path = folder / f"{prefix}-{kind}-ubyte{'.gz' * packed}"
                path.write_bytes(gzip.compress(data, mtime=0) if packed else data)

    return write


def _cifar(hundred: bool) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        folder = root / ("cifar-100-binary" if hundred else "cifar-10-batches-bin")
        files = (
            ("train.bin", "test.bin") if hundred else (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
        )
        folder.mkdir(parents=True)
        for name in files:
            records = 8 if hundred else 4
            rows = [bytes([0] * hundred + [i % 2]) + bytes([20 * i] * 3072) for i in range(records)]
            (folder / name).write_bytes(b"".join(rows))
        if not hundred:
            _text(folder / "batches.meta.txt", "\n".join(f"class{i}" for i in range(10)))

    return write


def _tiny_imagenet(root: Path) -> None:
    base = root / "tiny-imagenet-200"
    for label, name in enumerate(("n01", "n02")):
        for index in range(3):
            _image(base / "train" / name / "images" / f"{name}_{index}.JPEG", label)
        _image(base / "val" / "images" / f"val_{label}.JPEG", label)
    _text(base / "wnids.txt", "n02\nn01\n")
    _text(base / "val" / "val_annotations.txt", "val_0.JPEG\tn01\t0\t0\t9\t9\nval_1.JPEG\tn02\t0\t0\t9\t9\n")


def _pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    for part, first in (("trainval", 0), ("test", 4)):
        names = [f"{breed}_{first + i}" for breed in ("Abyssinian", "pug") for i in range(4)]
        for name in names:
            _image(base / "images" / f"{name}.jpg", name.startswith("pug"))
        rows = [f"{name} {1 + name.startswith('pug')} 1 1\n" for name in names]
        _text(base / "annotations" / f"{part}.txt", "# a comment\n" + "".join(rows))


def _cub(root: Path) -> None:
    base, names = root / "CUB_200_2011", [f"{1 + i % 2:03d}.bird{i % 2}/p{i}.jpg" for i in range(8)]
    for index, name in enumerate(names):
        _image(base / "images" / name, index % 2)
    _text(base / "classes.txt", "1 001.bird0\n2 002.bird1\n")
    _text(base / "images.txt", "".join(f"{i + 1} {name}\n" for i, name in enumerate(names)))
    _text(base / "image_class_labels.txt", "".join(f"{i + 1} {1 + i % 2}\n" for i in range(8)))
    _text(base / "train_test_split.txt", "".join(f"{i + 1} {int(i < 6)}\n" for i in range(8)))


def _mat(path: Path, packed: bool = True, **variables: Any) -> None:
    from scipy.io import savemat

    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    savemat(content, variables, do_compression=packed)
    stamp = b"MATLAB 5.0 MAT-file".ljust(116)
    path.write_bytes(stamp + content.getvalue()[116:])


def _dogs(root: Path) -> None:
    base = root / "stanford-dogs"
    for part, first in (("train", 0), ("test", 3)):
        names = [f"n0{dog}-dog{dog}/n0{dog}_{first + i}.jpg" for dog in range(2) for i in range(3)]
        for name in names:
            _image(base / "Images" / name)
        cells = np.array(names, dtype=object)[:, None]
        labels = np.array([1 + int(name[2]) for name in names], dtype=float)[:, None]
        _mat(base / f"{part}_list.mat", part == "train", file_list=cells, annotation_list=cells, labels=labels)


def _flowers(root: Path) -> None:
    base = root / "flowers-102"
    for index in range(6):
        _image(base / "jpg" / f"image_{index + 1:05d}.jpg")
    _mat(base / "imagelabels.mat", labels=np.array([[1, 2, 3, 1, 2, 3]], dtype=np.uint8))
    sets = {"trnid": [[1, 3]], "valid": [[2, 4]], "tstid": [[5, 6]]}
    _mat(base / "setid.mat", False, **{name: np.array(ids, dtype=np.uint16) for name, ids in sets.items()})


GOOD: dict[str, Callable[[Path], None]] = {
    "folder": _folder,
    "labels": _labels,
    "labels-columns": _labels_columns,
    "images": _images,
    "yolo": _yolo,
    "yolo-lists": _yolo_lists,
    "coco": _coco,
    "vww": _vww,
    "mnist": _idx(False),
    "mnist-gz": _idx(True),
    "cifar10": _cifar(False),
    "cifar100": _cifar(True),
    "tiny-imagenet": _tiny_imagenet,
    "pets": _pets,
    "cub200": _cub,
    "dogs": _dogs,
    "flowers102": _flowers,
}


def write_all(corpus: Path) -> None:
    """Write the good files of every reader."""
    for name, write in GOOD.items():
        shutil.rmtree(corpus / name / "good", ignore_errors=True)
        write(corpus / name / "good")


if __name__ == "__main__":
    write_all(CORPUS)
    good_runs.write_all(CORPUS)
