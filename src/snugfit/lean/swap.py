"""Convert the layers of a module to lean ones, and back."""

from __future__ import annotations

from torch import nn

from snugfit.lean.activation import LeanLeakyReLU, LeanReLU, LeanReLU6
from snugfit.lean.batchnorm import LeanBatchNorm1d, LeanBatchNorm2d, LeanBatchNorm3d
from snugfit.lean.convolution import LeanConv2d
from snugfit.lean.maxpool import LeanMaxPool2d
from snugfit.lean.pooling import LeanAdaptiveAvgPool2d, LeanAvgPool2d

_LEAN: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: LeanConv2d,
    nn.BatchNorm1d: LeanBatchNorm1d,
    nn.BatchNorm2d: LeanBatchNorm2d,
    nn.BatchNorm3d: LeanBatchNorm3d,
    nn.ReLU: LeanReLU,
    nn.ReLU6: LeanReLU6,
    nn.LeakyReLU: LeanLeakyReLU,
    nn.MaxPool2d: LeanMaxPool2d,
    nn.AvgPool2d: LeanAvgPool2d,
    nn.AdaptiveAvgPool2d: LeanAdaptiveAvgPool2d,
}
_STOCK = {lean: stock for stock, lean in _LEAN.items()}


def use_lean(module: nn.Module) -> None:
    """Replace every layer of a module that has a lean version, in place.

    ``requires_grad`` is read in every call and may change in between. Weights, state dict, hooks and outputs do not
    change; subclasses of torch's layers are left unchanged, because they may compute something else. Call
    :func:`use_stock` before the module is traced by ``torch.fx``, or pickled for use without snugfit.

    Args:
        module: any module, including those that ``torch.fx`` made.
    """
    _swap(module, _LEAN)


def use_stock(module: nn.Module) -> None:
    """Undo :func:`use_lean` and :func:`use_lean_convolutions`, in place."""
    _swap(module, _STOCK)


def use_lean_convolutions(module: nn.Module) -> None:
    """Replace every plain ``nn.Conv2d`` of a module by a :class:`LeanConv2d`, and leave the other layers."""
    _swap(module, {nn.Conv2d: LeanConv2d})


def _swap(module: nn.Module, kinds: dict[type[nn.Module], type[nn.Module]]) -> None:
    for layer in module.modules():
        if type(layer) in kinds:
            layer.__class__ = kinds[type(layer)]
