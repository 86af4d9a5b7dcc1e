"""Autograd operators that compute the same as torch's own in less memory.

>>> import torch
>>> from torch import nn
>>> from snugfit.memory import saved_bytes
>>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).requires_grad_(False)
>>> images = torch.ones(1, 3, 8, 8, requires_grad=True)
>>> before = saved_bytes(lambda: network(images), held=network.parameters())
>>> use_lean(network)  # in place; with all weights frozen a ReLU keeps one bit per value
>>> before, saved_bytes(lambda: network(images), held=network.parameters())
(1920, 36)
>>> use_stock(network)

``examples/own_loop_with_lean.py`` trains with it.
"""

from snugfit._upstream import fix_group_norm
from snugfit.lean.activation import LeanLeakyReLU, LeanReLU, LeanReLU6
from snugfit.lean.batchnorm import LeanBatchNorm1d, LeanBatchNorm2d, LeanBatchNorm3d
from snugfit.lean.compression import CompressedActivations
from snugfit.lean.convolution import LeanConv2d, StandardisedConv2d
from snugfit.lean.fused_norm_act import FusedNormAct, FusedPoolNormAct
from snugfit.lean.int8_weights import FloatState, restore_float, store_int8
from snugfit.lean.per_sample import run_per_sample
from snugfit.lean.pooling import LeanAdaptiveAvgPool2d, LeanAvgPool2d, LeanMaxPool2d, average_pool
from snugfit.lean.switches import (
    disable_inplace,
    enable_inplace,
    release_images,
    retain_images,
    use_lean,
    use_lean_convolutions,
    use_stock,
)

fix_group_norm()

__all__ = [
    "CompressedActivations",
    "FloatState",
    "FusedNormAct",
    "FusedPoolNormAct",
    "LeanAdaptiveAvgPool2d",
    "LeanAvgPool2d",
    "LeanBatchNorm1d",
    "LeanBatchNorm2d",
    "LeanBatchNorm3d",
    "LeanConv2d",
    "LeanLeakyReLU",
    "LeanMaxPool2d",
    "LeanReLU",
    "LeanReLU6",
    "StandardisedConv2d",
    "average_pool",
    "disable_inplace",
    "enable_inplace",
    "release_images",
    "restore_float",
    "retain_images",
    "run_per_sample",
    "store_int8",
    "use_lean",
    "use_lean_convolutions",
    "use_stock",
]
