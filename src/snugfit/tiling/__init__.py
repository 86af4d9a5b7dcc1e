"""Convolutional networks whose feature maps are cut into tiles, over several devices or over time on one.

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

from snugfit._core.hardware import Cluster
from snugfit.tiling.cost_counter import count_step_cost
from snugfit.tiling.distributed import TiledNetwork
from snugfit.tiling.exchange import Cell, cells_of
from snugfit.tiling.geometry import Interval, Window, balanced, weighted
from snugfit.tiling.grouping import CostModel, Prices, Profile, Work, cheapest, every_cut, group_work, one_group
from snugfit.tiling.layers import Layer, Layers, MapSize, Region, Tiling
from snugfit.tiling.plan import schedule_of
from snugfit.tiling.schedule import Schedule
from snugfit.tiling.sequential import TiledForward
from snugfit.tiling.splitting import groups_to_split
from snugfit.tiling.step_cost import Prediction
from snugfit.tiling.tileable_prefix import find_tileable_prefix
from snugfit.tiling.transport import ProcessTransport, Transport

__all__ = [
    "Cell",
    "Cluster",
    "CostModel",
    "Interval",
    "Layer",
    "Layers",
    "MapSize",
    "Prediction",
    "Prices",
    "ProcessTransport",
    "Profile",
    "Region",
    "Schedule",
    "TiledForward",
    "TiledNetwork",
    "Tiling",
    "Transport",
    "Window",
    "Work",
    "balanced",
    "cells_of",
    "cheapest",
    "count_step_cost",
    "every_cut",
    "find_tileable_prefix",
    "group_work",
    "groups_to_split",
    "one_group",
    "schedule_of",
    "weighted",
]
