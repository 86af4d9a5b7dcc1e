"""Oxford 102 Flower (Nilsback and Zisserman, ICVGIP 2008): 102 kinds, 1,020, 1,020 and 6,149 photos."""

from __future__ import annotations

from pathlib import Path

from snugfit._data.listed import Listing, number
from snugfit._data.matlab import read_vectors
from snugfit._data.sets import Parts
from snugfit.errors import DataError

LABELS, DIVISION = "imagelabels.mat", "setid.mat"
MARKERS = (DIVISION,)  # the last of the files to be fetched
_PARTS = {"train": "trnid", "val": "valid", "test": "tstid"}
_KINDS = """
pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon orchid,
bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle, yellow iris,
globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily, pincushion flower,
fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless gentian, artichoke,
sweet william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly, ruby-lipped cattleya,
cape flower, great masterwort, siam tulip, lenten rose, barbeton daisy, daffodil, sword lily, poinsettia,
bolero deep blue, wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia, wild pansy, primula,
sunflower, pelargonium, bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow dahlia, cautleya spicata,
japanese anemone, black-eyed susan, silverbush, californian poppy, osteospermum, spring crocus, bearded iris,
windflower, tree poppy, gazania, azalea, water lily, rose, thorn apple, morning glory, passion flower, lotus,
toad lily, anthurium, frangipani, clematis, hibiscus, columbine, desert-rose, tree mallow, magnolia, cyclamen,
watercress, canna lily, hippeastrum, bee balm, ball moss, foxglove, bougainvillea, camellia, mallow,
mexican petunia, bromelia, blanket flower, trumpet creeper, blackberry lily
"""
KINDS = tuple(" ".join(_KINDS.split()).split(", "))
"""Names of the classes in the order of their labels, which the files themselves do not have."""


def read(root: Path, image_size: int, workers: int) -> Parts:
    """Read ``jpg/image_00001.jpg`` and so on, with the labels and the division of the authors.

    ``imagelabels.mat`` has the label of every image, from 1; ``setid.mat`` the numbers of the images to train on
    (``trnid``), to validate on (``valid``) and to test on (``tstid``).

    Raises:
        DataError: a list or image is missing, a list is malformed, the lists disagree, or a file is not an image.
    """
    path, division = root / LABELS, root / DIVISION
    texts = read_vectors(path, numbers=["labels"])["labels"]
    labels = [number(text, 1, len(KINDS), f"{path}, entry {entry}") for entry, text in enumerate(texts, start=1)]
    parts = read_vectors(division, numbers=_PARTS.values())
    if (count := sum(map(len, parts.values()))) != len(labels):
        raise DataError(f"{path} has {len(labels)} labels, but {division} names {count} images. Download both again.")
    listing = Listing(root / "jpg", len(KINDS), tuple(_PARTS))
    for part, variable in _PARTS.items():
        for entry, text in enumerate(parts[variable], start=1):
            place = f"{division}, {variable}, entry {entry}"
            image = number(text, 1, len(labels), place)
            label = labels[image - 1]
            listing.add(part, f"image_{image:05d}.jpg", str(label), KINDS[label - 1], place)
    return listing.parts(image_size, workers, KINDS)
