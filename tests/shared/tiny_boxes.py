"""Coloured rectangles on noise, with their boxes, in YOLO's and in COCO's format."""

import json

import numpy as np
from PIL import Image

COLOURS = ((230, 30, 30), (30, 30, 230))
NAMES = ("red", "blue")


def picture(seed, size=64, most=2):
    """An image and its boxes: class, left, top, width, height in pixels; every colour at most once."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(60, 160, (size, size, 3), dtype=np.uint8)
    boxes = []
    for label in rng.permutation(len(COLOURS))[: rng.integers(1, most + 1)].tolist():
        width, height = rng.integers(size * 3 // 8, size * 5 // 8, 2).tolist()
        left, top = (int(rng.integers(0, size - side + 1)) for side in (width, height))
        pixels[top : top + height, left : left + width] = COLOURS[label]
        boxes.append((label, left, top, width, height))
    return pixels, boxes


def fractions(box, width, height):
    label, left, top, across, down = box
    return label, (left + across / 2) / width, (top + down / 2) / height, across / width, down / height


def line(box, width=64, height=64):
    label, *rest = fractions(box, width, height)
    return " ".join([str(label), *(f"{value:.6f}" for value in rest)])


def write_yolo(root, parts=(("train", 40), ("val", 12)), size=64, first=0):
    """``images/<part>`` and ``labels/<part>``, or ``images`` and ``labels`` alone for the part ''; and a data.yaml."""
    seed = first
    for part, count in parts:
        for kind in ("images", "labels"):
            (root / kind / part).mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            pixels, boxes = picture(seed, size)
            Image.fromarray(pixels).save(root / "images" / part / f"{seed:04d}.png")
            text = "\n".join(line(box, size, size) for box in boxes)
            (root / "labels" / part / f"{seed:04d}.txt").write_text(text + "\n")
            seed += 1
    if any(part for part, _ in parts):
        named = "".join(f"{part}: images/{part}\n" for part, _ in parts)
        (root / "data.yaml").write_text(f"{named}names:\n  0: red\n  1: blue\n")
    return root


def write_coco(root, parts=(("train2017", 6), ("val2017", 3)), size=64):
    (root / "annotations").mkdir(parents=True)
    seed = 0
    for part, count in parts:
        (root / part).mkdir()
        images, annotations = [], []
        for _ in range(count):
            pixels, boxes = picture(seed, size)
            Image.fromarray(pixels).save(root / part / f"{seed:04d}.png")
            images.append({"id": 100 + seed, "file_name": f"{seed:04d}.png", "width": size, "height": size})
            for label, *box in boxes:
                # ids of categories are neither 0 nor in order
                entry = {"image_id": 100 + seed, "category_id": (3, 7)[label], "bbox": box, "iscrowd": 0, "area": 1}
                annotations.append(entry)
            seed += 1
        content = {
            "images": images,
            "annotations": annotations[::-1],
            "categories": [{"id": 7, "name": "blue"}, {"id": 3, "name": "red"}],
        }
        (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(content))
    return root
