"""Data sets by name or folder, their splits, and batches of them.

Modules that only files of images need (PIL), or only boxes, are not imported with the package.
What is missing, damaged, out of limits or of another kind is a ``DataError`` that names the file and the place in it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "BoxedBatches": "boxed",
    "BoxedImages": "boxes",
    "Decoder": "decode",
    "from_dataset": "user",
    "load_boxed": "boxed",
    "upright_size": "decode",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
