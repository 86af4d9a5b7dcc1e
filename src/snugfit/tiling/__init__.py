"""Convolutional networks whose maps are cut into tiles, over several devices or over time on one.

>>> import torch
>>> from torch import fx, nn
>>> layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 10)
>>> network = fx.symbolic_trace(nn.Sequential(*layers))
>>> forward = TiledForward(network, (3, 32, 32), grid=(2, 2))  # weights, buffers and gradients stay the network's
>>> images = torch.ones(1, 3, 32, 32)
>>> torch.allclose(forward(images), network(images), atol=1e-5)
True

``examples/own_loop_with_tiling.py`` trains with it.
"""

from snugfit.tiling.geometry import Interval, Window, balanced, weighted
from snugfit.tiling.grouping import CostModel, Prices, Work, cheapest, group_work
from snugfit.tiling.layers import Layer, Layers, MapSize, Region, Tiling
from snugfit.tiling.profile import Profile, every_cut, one_group
from snugfit.tiling.sequential import TiledForward
from snugfit.tiling.tileable_prefix import stem_of

__all__ = [
    "CostModel",
    "Interval",
    "Layer",
    "Layers",
    "MapSize",
    "Prices",
    "Profile",
    "Region",
    "TiledForward",
    "Tiling",
    "Window",
    "Work",
    "balanced",
    "cheapest",
    "every_cut",
    "group_work",
    "one_group",
    "stem_of",
    "weighted",
]
