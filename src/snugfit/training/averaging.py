"""BatchNorm statistics for weights that no training step has seen: the average of those that were trained.

The schedule-free package asks for this before every evaluation (NOTES LLS 4).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

REFRESH_BATCHES = 50
"""Training batches that the statistics are taken over."""


def refresh_norms(module: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Take BatchNorm's running statistics anew, as the mean over the first batches.

    Args:
        module: run in training mode on inputs (B, ...), without gradients.
        batches: pairs of inputs and labels, as training sees them.
        device: where to compute.
    """
    update_bn(islice(batches, REFRESH_BATCHES), module, device=device)
