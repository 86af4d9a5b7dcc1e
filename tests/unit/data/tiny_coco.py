"""COCO releases written small, in the original format."""

import json

from PIL import Image

PERSON, DOG = 1, 18
WIDE, TALL = (200, 100), (60, 100)  # 0.5 % of these are 100 and 30 pixels


def objects(*areas, category=PERSON, crowd=0):
    """Annotations of one category; the boxes are twice as large as the objects in them."""
    return [
        {"category_id": category, "area": area, "bbox": [0, 0, 2 * area, 1], "iscrowd": crowd, "segmentation": [[0, 0]]}
        for area in areas
    ]


# Size, mode and annotations of an image, and its label.
TRAIN = [
    (WIDE, "RGB", objects(5000), 1),
    (WIDE, "RGB", [], 0),
    (WIDE, "RGB", objects(100.25), 1),
    (WIDE, "L", objects(100), 0),
    (WIDE, "RGB", objects(60, 60.5), 0),  # two small ones do not add up; box areas are above the threshold
    (TALL, "L", objects(31), 1),
    (TALL, "RGB", objects(30.0), 0),
    (TALL, "RGB", objects(3000, category=DOG), 0),
    (TALL, "RGB", objects(3000, category=DOG) + objects(2, 900), 1),
    (WIDE, "RGB", objects(4000, crowd=1), 1),
]
VAL = [(TALL, "RGB", objects(600), 1), (WIDE, "L", objects(50), 0), (WIDE, "RGB", [], 0), (TALL, "L", objects(31), 1)]
FIRST_ID = {"train": 1000, "val": 20}


def write_release(root, year, **json_options):
    """Write TRAIN and VAL as the parts of a release."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for part, images in (("train", TRAIN), ("val", VAL)):
        (root / f"{part}{year}").mkdir()
        content = described(root / f"{part}{year}", images, FIRST_ID[part])
        (root / "annotations" / f"instances_{part}{year}.json").write_text(json.dumps(content, **json_options))


def described(folder, images, first_id):
    """COCO's description of images, which are written to a folder; annotations stand in no order of images."""
    listed, annotations = [], []
    for place, ((width, height), mode, present, _) in enumerate(images):
        name = f"COCO_{folder.name}_{first_id - place:012d}.jpg"
        image = Image.new("RGB", (width, height), (20 * place, 20 * place, 20 * place))
        image.convert(mode).save(folder / name)
        listed.append({"license": 1, "file_name": name, "height": height, "width": width, "id": first_id - place})
        annotations += [{"id": 7, "image_id": first_id - place, **one} for one in present]
    return {
        "info": {"description": 'a "{[,]}" set', "year": 2014},
        "images": listed,
        "licenses": [],
        "annotations": annotations[::-1],
        "categories": [{"supercategory": "animal", "id": DOG, "name": "dog"}, {"id": PERSON, "name": "person"}],
    }


def ids(part, *places):
    return "".join(f"{FIRST_ID[part] - place}\n" for place in places)
