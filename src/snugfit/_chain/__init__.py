"""A CNN as a chain of units: traced, cut, stored on disk, and converted back to a plain module."""

from snugfit._chain.blocks import ModuleBlock, find_blocks
from snugfit._chain.chain import Chain
from snugfit._chain.classifier import classifier_names
from snugfit._chain.initialise import initialise_by_reset, spill_module
from snugfit._chain.norms import tracking_norms
from snugfit._chain.store import UnitStore, load_into, release
from snugfit._chain.tail_split import split_tail
from snugfit._chain.unit import ConvFact, Unit
from snugfit._upstream import mend_group_norm

mend_group_norm()

__all__ = [
    "Chain",
    "ConvFact",
    "ModuleBlock",
    "Unit",
    "UnitStore",
    "classifier_names",
    "find_blocks",
    "initialise_by_reset",
    "load_into",
    "release",
    "spill_module",
    "split_tail",
    "tracking_norms",
]
