"""Data sets by name or folder, their splits, and batches of them.

Modules that only files of images need (PIL), or only boxes, are not imported with the package.
What is missing, damaged, out of limits or of another kind is a ``DataError`` that names the file and the place in it.
"""

from typing import TYPE_CHECKING

from snugfit._core.late_names import late_names
from snugfit._data.batches import Batches as Batches
from snugfit._data.catalog import ensure as ensure
from snugfit._data.catalog import image_folder as image_folder
from snugfit._data.catalog import import_reader as import_reader
from snugfit._data.catalog import load as load
from snugfit._data.catalog import names as names
from snugfit._data.catalog import read_folder as read_folder
from snugfit._data.catalog import super_classes as super_classes
from snugfit._data.sets import ImageSet as ImageSet
from snugfit._data.sets import Splits as Splits
from snugfit._data.sets import Subset as Subset
from snugfit._data.transform import Transform as Transform

if TYPE_CHECKING:
    from snugfit._data.boxed import BoxedBatches as BoxedBatches
    from snugfit._data.boxed import load_boxed as load_boxed
    from snugfit._data.boxes import BoxedImages as BoxedImages
    from snugfit._data.decode import Decoder as Decoder
    from snugfit._data.decode import upright_size as upright_size
    from snugfit._data.user import from_dataset as from_dataset

_LATE = {
    "snugfit._data.boxed": ("BoxedBatches", "load_boxed"),
    "snugfit._data.boxes": ("BoxedImages",),
    "snugfit._data.decode": ("Decoder", "upright_size"),
    "snugfit._data.user": ("from_dataset",),
}

__getattr__ = late_names(__name__, _LATE)
