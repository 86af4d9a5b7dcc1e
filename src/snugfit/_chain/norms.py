"""BatchNorm layers whose running statistics training updates."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def tracking_norms(module: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers of a module that currently track statistics, each once.

    Layers in evaluation mode and layers without running statistics do not.

    >>> [type(norm).__name__ for norm in tracking_norms(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval()))]
    ['BatchNorm1d']
    """
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, _BatchNorm) and layer.training and layer.running_mean is not None
    ]
