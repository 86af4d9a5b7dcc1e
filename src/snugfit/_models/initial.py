"""Initial weights of the networks' convolutions (He et al., 2015, arXiv:1502.01852, section 2.2)."""

from __future__ import annotations

from torch import nn


def he_normal(layer: nn.Module) -> None:
    """Draw a convolution's weights from a normal distribution of variance 2 / (outputs x rows x columns); no bias.

    Outputs, rows and columns are those of the weight. The gradients keep their scale from layer to layer. torchvision's
    ResNets, VGGs and MobileNets begin in the same way. With as many inputs as outputs, torch's own ``reset_parameters``
    draws weights 0.41 times as large. Behind a norm the effective learning rate is inversely proportional to the square
    of that.
    """
    assert isinstance(layer, nn.Conv2d)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
