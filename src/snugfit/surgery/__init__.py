"""Channel pruning: find groups of channels, drive them to zero and remove them.

>>> import torch
>>> from torch import fx, nn
>>> layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
>>> network = fx.symbolic_trace(nn.Sequential(*layers))
>>> groups = find_groups(network, (3, 32, 32))  # channels that can only be removed together
>>> [(group.name, width(network, group)) for group in groups]
[('0', 8)]
>>> sorted(remove_channels(network, groups, {"0": [0, 2, 5]}))
['0.bias', '0.weight', '1.bias', '1.running_mean', '1.running_var', '1.weight', '5.weight']
>>> network(torch.ones(1, 3, 32, 32)).shape, network.get_submodule("0").out_channels
(torch.Size([1, 10]), 3)

``examples/own_loop_with_surgery.py`` trains with it.
"""

from snugfit.surgery.channels import ChannelGroup, Slot, find_groups, width
from snugfit.surgery.distil import BlockDistillation, TeacherStudent, distil
from snugfit.surgery.fitting import kept_width, widest_widths, widths_for
from snugfit.surgery.hidden import blocks_of, copy_for_pruning, hidden_groups, narrowed_meta_copy
from snugfit.surgery.importance import channel_importance, most_important
from snugfit.surgery.joint import JointDistillation, later_biases
from snugfit.surgery.lasso import (
    DEFAULT_RATIO,
    add_penalty_gradient,
    add_penalty_gradients,
    penalised_weights,
    penalty,
    penalty_scale,
)
from snugfit.surgery.reconstruction import channels_by_reconstruction
from snugfit.surgery.reshape import (
    DEFAULT_THRESHOLD,
    Cut,
    adopt_widths,
    apply_cut,
    dead_channels,
    prune,
    prune_optimizer,
    remove_channels,
)
from snugfit.surgery.sidenet import attach_side_network, side_positions

__all__ = [
    "DEFAULT_RATIO",
    "DEFAULT_THRESHOLD",
    "BlockDistillation",
    "ChannelGroup",
    "Cut",
    "JointDistillation",
    "Slot",
    "TeacherStudent",
    "add_penalty_gradient",
    "add_penalty_gradients",
    "adopt_widths",
    "apply_cut",
    "attach_side_network",
    "blocks_of",
    "channel_importance",
    "channels_by_reconstruction",
    "copy_for_pruning",
    "dead_channels",
    "distil",
    "find_groups",
    "hidden_groups",
    "kept_width",
    "later_biases",
    "most_important",
    "narrowed_meta_copy",
    "penalised_weights",
    "penalty",
    "penalty_scale",
    "prune",
    "prune_optimizer",
    "remove_channels",
    "side_positions",
    "widest_widths",
    "width",
    "widths_for",
]
