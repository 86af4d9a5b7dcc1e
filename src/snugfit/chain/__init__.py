"""Any CNN as a chain of units: traced, cut, kept on disk, and turned back into a plain module."""

from snugfit.chain.blocks import ModuleBlock, find_blocks
from snugfit.chain.chain import Chain
from snugfit.chain.classifier import classifier_names
from snugfit.chain.initialise import initialise_by_reset, spill_module
from snugfit.chain.norms import tracking_norms
from snugfit.chain.store import UnitStore, load_into, release
from snugfit.chain.tail_split import split_tail
from snugfit.chain.unit import ConvFact, Unit
from snugfit.upstream import mend_group_norm

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
