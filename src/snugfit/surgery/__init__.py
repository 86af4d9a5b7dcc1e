"""Network surgery: channels that no longer take part are found, driven to zero and removed."""

from snugfit.surgery.channels import ChannelGroup, Slot, find_groups, width
from snugfit.surgery.distil import Distilled, Recipe, distil
from snugfit.surgery.fitting import best_widths, widths_for
from snugfit.surgery.hidden import blocks_of, hidden_groups
from snugfit.surgery.importance import channel_importance, most_important, removed_share
from snugfit.surgery.joint import JointDistillation, later_biases
from snugfit.surgery.lasso import (
    DEFAULT_RATIO,
    add_penalty_gradient,
    add_penalty_gradients,
    penalised,
    penalty,
    penalty_scale,
)
from snugfit.surgery.optimum import Choices, Chosen, choose, smallest_peak
from snugfit.surgery.reconstruction import reconstructing
from snugfit.surgery.reshape import (
    DEFAULT_THRESHOLD,
    Cut,
    dead_channels,
    prune,
    prune_optimizer,
    remove_channels,
    take,
)
from snugfit.surgery.sidenet import attach_side_network, side_positions
from snugfit.surgery.sizes import adopt_widths
from snugfit.surgery.twin import narrowed, pruned_twin
from snugfit.surgery.widths import kept_width, ratios, sensitive_blocks, widest

__all__ = [
    "DEFAULT_RATIO",
    "DEFAULT_THRESHOLD",
    "ChannelGroup",
    "Choices",
    "Chosen",
    "Cut",
    "Distilled",
    "JointDistillation",
    "Recipe",
    "Slot",
    "add_penalty_gradient",
    "add_penalty_gradients",
    "adopt_widths",
    "attach_side_network",
    "best_widths",
    "blocks_of",
    "channel_importance",
    "choose",
    "dead_channels",
    "distil",
    "find_groups",
    "hidden_groups",
    "kept_width",
    "later_biases",
    "most_important",
    "narrowed",
    "penalised",
    "penalty",
    "penalty_scale",
    "prune",
    "prune_optimizer",
    "pruned_twin",
    "ratios",
    "reconstructing",
    "remove_channels",
    "removed_share",
    "sensitive_blocks",
    "side_positions",
    "smallest_peak",
    "take",
    "widest",
    "width",
    "widths_for",
]
