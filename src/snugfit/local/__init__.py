"""Local losses: the small classifiers that train a unit from its own output, and the exits that they leave behind."""

from snugfit.local.auxiliary import CLASSIC_FILTERS, AuxiliaryNetwork, aan_filters, is_initial
from snugfit.local.base import LocalLoss, LocalOutput, NetworkFacts, UnitShape
from snugfit.local.linear import LinearLocalLoss, pool_kernel
from snugfit.local.registry import LOCAL_LOSSES, build_local_loss

__all__ = [
    "CLASSIC_FILTERS",
    "LOCAL_LOSSES",
    "AuxiliaryNetwork",
    "LinearLocalLoss",
    "LocalLoss",
    "LocalOutput",
    "NetworkFacts",
    "UnitShape",
    "aan_filters",
    "build_local_loss",
    "is_initial",
    "pool_kernel",
]
