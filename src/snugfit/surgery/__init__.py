"""Network surgery: channels that no longer take part are found, driven to zero and removed."""

from snugfit.surgery.channels import ChannelGroup, Slot, find_groups, width
from snugfit.surgery.lasso import (
    DEFAULT_RATIO,
    add_penalty_gradient,
    add_penalty_gradients,
    penalised,
    penalty,
    penalty_scale,
)
from snugfit.surgery.reshape import DEFAULT_THRESHOLD, Cut, dead_channels, prune, prune_optimizer, take
from snugfit.surgery.sidenet import attach_side_network, side_positions
from snugfit.surgery.sizes import adopt_widths

__all__ = [
    "DEFAULT_RATIO",
    "DEFAULT_THRESHOLD",
    "ChannelGroup",
    "Cut",
    "Slot",
    "add_penalty_gradient",
    "add_penalty_gradients",
    "adopt_widths",
    "attach_side_network",
    "dead_channels",
    "find_groups",
    "penalised",
    "penalty",
    "penalty_scale",
    "prune",
    "prune_optimizer",
    "side_positions",
    "take",
    "width",
]
