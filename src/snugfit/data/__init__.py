"""Data sets by name or folder, their splits, and batches of them."""

from snugfit.data.batches import Batches
from snugfit.data.boxed import BoxedBatches, box_sizes, boxed_path, load_boxed
from snugfit.data.boxes import BoxedImages
from snugfit.data.catalog import ensure, load, names, read_folder, super_classes
from snugfit.data.decode import Decoder, upright_size
from snugfit.data.locate import image_folder
from snugfit.data.sets import ImageSet, Splits, Subset
from snugfit.data.transform import Transform
from snugfit.data.user import from_dataset

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
