"""Data sets by name or folder, their splits, and batches of them.

What is missing, damaged, out of limits or of another kind is a ``DataError`` that names the file and the place in it.
"""

from snugfit._data.batches import Batches
from snugfit._data.boxed import BoxedBatches, box_sizes, boxed_path, load_boxed
from snugfit._data.boxes import BoxedImages
from snugfit._data.catalog import ensure, image_folder, load, names, read_folder, super_classes
from snugfit._data.decode import Decoder, upright_size
from snugfit._data.sets import ImageSet, Splits, Subset
from snugfit._data.transform import Transform
from snugfit._data.user import from_dataset

__all__ = [
    "Batches",
    "BoxedBatches",
    "BoxedImages",
    "Decoder",
    "ImageSet",
    "Splits",
    "Subset",
    "Transform",
    "box_sizes",
    "boxed_path",
    "ensure",
    "from_dataset",
    "image_folder",
    "load",
    "load_boxed",
    "names",
    "read_folder",
    "super_classes",
    "upright_size",
]
