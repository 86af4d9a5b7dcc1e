"""Convolutional networks whose maps are cut into tiles, over several devices or over time on one."""

from snugfit.tiling.geometry import Interval, Window, balanced, weighted
from snugfit.tiling.grouping import CostModel, Prices, Work, cheapest, group_work
from snugfit.tiling.layers import Layer, Layers, MapSize, Region, Tiling
from snugfit.tiling.profile import Profile, every_cut, one_group
from snugfit.tiling.sequential import TiledForward
from snugfit.tiling.stem import stem_of

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
