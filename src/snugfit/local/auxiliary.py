"""The convolutional auxiliary network of local learning, and NeuroFlux's rule for its width (section 3)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from snugfit.local.base import LocalLoss, NetworkStats, UnitShape

CLASSIC_FILTERS = 256
"""Filters of every auxiliary network in classic local learning (NeuroFlux section 3, opportunity 1)."""

POOLED_SIDE = 2


def is_initial(largest: tuple[int, int], conv_sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether a unit is initial: nothing up to and including its last conv downsamples (NeuroFlux section 3).

    A feature map counts as downsampled once a side is at most half (rounded up) of the network's largest feature map,
    which is the stem's output if the stem downsamples. The few pixels that an unpadded conv removes do not count.
    Sizes are heights and widths: of the largest feature map, and of the last conv's output of every unit up to and
    including this one.
    """
    pairs = [pair for sizes in conv_sizes for pair in zip(sizes, largest, strict=True)]
    return all(size >= side or size > (side + 1) // 2 for size, side in pairs)


def aan_filters(initial: bool, narrowest: int, widest: int) -> int:
    """Filters of an adaptive auxiliary network: half of the narrowest conv for initial units, half of the widest after.

    VGG (64 to 512 filters): 32, then 256 (NeuroFlux section 3, opportunity 1). It has at most
    :data:`CLASSIC_FILTERS`, or it would need more memory than the classic one that it improves.
    """
    return min(CLASSIC_FILTERS, max(1, (narrowest if initial else widest) // 2))


class AuxiliaryNetwork(LocalLoss):
    """3x3 conv, batch norm, ReLU, average pool to 2x2 and one linear layer (NeuroFlux eq. 2: beta, F and gamma).

    After a unit with a flat output it is the linear layer alone, and ``filters`` is 0.
    """

    gives_up_gradient: bool = True

    def __init__(self, unit: UnitShape, network: NetworkStats, filters: int) -> None:
        super().__init__()
        self.filters = 0 if unit.flat else filters
        width, layers = unit.output_shape[0], OrderedDict[str, nn.Module]()
        if not unit.flat:
            layers["conv"] = nn.Conv2d(width, filters, kernel_size=3, padding=1, bias=False)
            layers["norm"] = nn.BatchNorm2d(filters)
            layers["relu"] = nn.ReLU(inplace=True)
            layers["pool"] = nn.AdaptiveAvgPool2d(POOLED_SIDE)
            layers["flatten"] = nn.Flatten()
            width = filters * POOLED_SIDE**2
        layers["linear"] = nn.Linear(width, network.classes)
        self.layers = nn.Sequential(layers)

    def predict(self, features: Tensor) -> Tensor:
        """Return logits (B, K) of features (B, C, H, W) or (B, D)."""
        logits: Tensor = self.layers(features)
        return logits


def adaptive_auxiliary(unit: UnitShape, network: NetworkStats) -> AuxiliaryNetwork:
    """Build the auxiliary network of AAN-LL, its filters by :func:`aan_filters`."""
    return AuxiliaryNetwork(unit, network, aan_filters(unit.initial, network.narrowest, network.widest))


def classic_auxiliary(unit: UnitShape, network: NetworkStats) -> AuxiliaryNetwork:
    """Build the auxiliary network of classic local learning: :data:`CLASSIC_FILTERS` filters everywhere."""
    return AuxiliaryNetwork(unit, network, CLASSIC_FILTERS)


LOSSES = {"aan": adaptive_auxiliary, "classic": classic_auxiliary}
