"""Local losses: the small classifiers that train a unit from its own output, and the exits that they leave behind."""

from snugfit.local.auxiliary import CLASSIC_FILTERS, AuxiliaryNetwork, aan_filters, is_initial
from snugfit.local.base import LocalLoss, LocalOutput, NetworkFacts, UnitShape
from snugfit.local.latents import LATENT_LIMIT, Latents, pooled_side
from snugfit.local.linear import LinearLocalLoss
from snugfit.local.lls import LLS, LLSM, LLSMxM
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
    "NetworkFacts",
    "Signal",
    "UnitShape",
    "aan_filters",
    "build_local_loss",
    "check_local_loss",
    "is_initial",
    "learning_signal",
    "pooled_side",
]
