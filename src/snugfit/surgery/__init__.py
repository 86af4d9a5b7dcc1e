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

__all__ = [
    "DEFAULT_RATIO",
    "ChannelGroup",
    "Slot",
    "add_penalty_gradient",
    "add_penalty_gradients",
    "find_groups",
    "penalised",
    "penalty",
    "penalty_scale",
    "width",
]
