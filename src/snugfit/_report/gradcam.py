"""Grad-CAM: which parts of an image are evidence for a class (Selvaraju et al., 2017, section 3; LLS, Figure 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from snugfit.errors import ModelError


class Explained(NamedTuple):
    """Heat maps (B, H, W), not below 0; the class (B,) that each explains; and the logits (B, K)."""

    maps: Tensor
    classes: Tensor
    logits: Tensor


@torch.enable_grad()
def grad_cam(model: Callable[[Tensor], Tensor], images: Tensor, classes: Tensor | None = None) -> Explained:
    """Heat maps of images for one class each.

    A channel of the last feature map A is weighted by the spatial mean of its gradient, and only the positive part of
    the sum is kept: ``ReLU(sum_k mean_ij(dy_c / dA_k_ij) A_k)``, upsampled bilinearly to the images.

    Args:
        model: images (B, C, H, W) to logits (B, K), in evaluation mode.
        images: (B, C, H, W), normalised for the model.
        classes: labels (B,); the predicted ones by default.

    Raises:
        ModelError: no convolution of the model outputs a feature map of more than one pixel, or the logits ignore it.
    """
    seen = _LastMap()
    with seen:
        logits = model(images.detach().requires_grad_().clone())
    chosen = logits.argmax(1) if classes is None else classes
    if seen.features is None:
        raise ModelError("the model has no convolution whose output is a feature map, so there is nothing to explain.")
    score = logits.gather(1, chosen[:, None]).sum()
    (gradient,) = torch.autograd.grad(score, seen.features, allow_unused=True)
    if gradient is None:
        raise ModelError("the model's outputs do not depend on its last convolution, so there is nothing to explain.")
    weights = gradient.mean((2, 3), keepdim=True)
    maps = F.relu((weights * seen.features.detach()).sum(1, keepdim=True))
    upsampled = F.interpolate(maps, images.shape[-2:], mode="bilinear", align_corners=False)
    return Explained(upsampled[:, 0].detach(), chosen, logits.detach())


class _LastMap(TorchFunctionMode):
    """Keeps the last convolution's feature map after normalisation, residual sum and activation, before the next pool.

    Hooks see modules only, but residual sums and activations are often functions, above all in traced networks.

    Attributes:
        features: (B, C, H, W); None until there is one of more than a pixel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 4 and result.requires_grad:
            size = result.shape[-2:]
            is_map = func is F.conv2d and size.numel() > 1
            if is_map or (self.features is not None and size == self.features.shape[-2:]):
                self.features = result
        return result
