"""Local losses: small classifiers that train a unit from its own output and serve as exits.

>>> import torch
>>> from torch import nn
>>> unit = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())  # images (B, 1, 16, 16) to maps (B, 8, 16, 16)
>>> local_loss = build_local_loss("lls-m", UnitShape((8, 16, 16)), NetworkStats(narrowest=8, widest=8, classes=10))
>>> loss, logits = local_loss(unit(torch.ones(2, 1, 16, 16)), torch.tensor([3, 7]))
>>> loss.backward()
>>> logits.shape, unit[0].weight.grad is not None
(torch.Size([2, 10]), True)

``examples/own_loop_with_local.py`` trains with it.
"""

from snugfit.local.auxiliary import CLASSIC_FILTERS, AuxiliaryNetwork, aan_filters, is_initial
from snugfit.local.base import LocalLoss, LocalOutput, NetworkStats, UnitShape
from snugfit.local.lls import LATENT_LIMIT, LLS, LLSM, Latents, LinearLocalLoss, LLSMxM, pooled_side
from snugfit.local.registry import LOCAL_LOSSES, build_local_loss, check_local_loss
from snugfit.local.signal import Signal, learning_signal

__all__ = [
    "CLASSIC_FILTERS",
    "LATENT_LIMIT",
    "LLS",
    "LLSM",
    "LOCAL_LOSSES",
    "AuxiliaryNetwork",
    "LLSMxM",
    "Latents",
    "LinearLocalLoss",
    "LocalLoss",
    "LocalOutput",
    "NetworkStats",
    "Signal",
    "UnitShape",
    "aan_filters",
    "build_local_loss",
    "check_local_loss",
    "is_initial",
    "learning_signal",
    "pooled_side",
]
