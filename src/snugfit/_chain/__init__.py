"""A CNN as a chain of units: traced, cut, stored on disk, and converted back to a plain module."""

from snugfit._chain.blocks import ModuleBlock as ModuleBlock
from snugfit._chain.blocks import find_blocks as find_blocks
from snugfit._chain.chain import Chain as Chain
from snugfit._chain.chain import classifier_names as classifier_names
from snugfit._chain.hooks import bypassed_hooks as bypassed_hooks
from snugfit._chain.hooks import tracking_norms as tracking_norms
from snugfit._chain.initialise import initialise_by_reset as initialise_by_reset
from snugfit._chain.inputs import take_inputs as take_inputs
from snugfit._chain.inputs import taking_one_tensor as taking_one_tensor
from snugfit._chain.propagation import needs_values as needs_values
from snugfit._chain.propagation import without_onednn as without_onednn
from snugfit._chain.store import UnitStore as UnitStore
from snugfit._chain.store import distinct_state as distinct_state
from snugfit._chain.store import load_into as load_into
from snugfit._chain.store import load_state as load_state
from snugfit._chain.store import release as release
from snugfit._chain.store import spill_module as spill_module
from snugfit._chain.subgraph import averaged_side as averaged_side
from snugfit._chain.subgraph import layers_called_once as layers_called_once
from snugfit._chain.subgraph import split_tail as split_tail
from snugfit._chain.unit import ConvFact as ConvFact
from snugfit._chain.unit import Unit as Unit
from snugfit._chain.whole import on_meta_or as on_meta_or
from snugfit._upstream import fix_group_norm

fix_group_norm()
