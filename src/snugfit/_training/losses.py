"""Losses of a whole network that classifies, other than cross entropy: the focal loss, and those from Python."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from snugfit._core.workload import Workload
from snugfit.errors import UsageError, reason_of
from snugfit.memory import is_out_of_memory

Loss = Callable[[Tensor, Tensor], Tensor]
"""From logits (B, classes) and labels (B,) to the mean loss, a scalar.

Mixed images have probabilities (B, classes), and images with several labels a 0 or 1 for each class (B, classes).
"""


def focal_loss(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """Mean (scalar) of ``-(1 - p)^gamma log p`` for logits (B, classes); p is the probability of the label, (B,).

    For targets that are probabilities (B, classes), it is the mean over the classes of each image, weighted by these.
    Lin et al., Focal Loss for Dense Object Detection (ICCV 2017), equation 4; 2 is the exponent of their section 5.1.
    """
    mixed = labels.is_floating_point()
    losses = -F.log_softmax(logits, 1) if mixed else F.cross_entropy(logits, labels, reduction="none")
    losses = _focused(losses, gamma)
    return ((labels * losses).sum(1) if mixed else losses).mean()


def _focused(losses: Tensor, gamma: float) -> Tensor:
    """Cross entropies ``-log p`` of any shape, times ``(1 - p)^gamma``."""
    least = torch.finfo(losses.dtype).tiny  # a power below 1 has no finite gradient at 0
    return (-torch.expm1(-losses)).clamp_min(least) ** gamma * losses


def binary_loss(logits: Tensor, targets: Tensor, gamma: float | None = None) -> Tensor:
    """Mean binary cross entropy (scalar) of logits (B, classes) and targets (B, classes) in [0, 1].

    With ``gamma`` it is the binary focal loss of the paper of :func:`focal_loss`, equation 4.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(logits.dtype)
    if gamma is None:
        return F.binary_cross_entropy_with_logits(logits, targets)
    present, absent = (_focused(F.softplus(sign * logits), gamma) for sign in (-1, 1))
    return (targets * present + (1 - targets) * absent).mean()


def check_loss(loss: Loss | None, workload: Workload, device: torch.device) -> None:
    """Refuse a loss from Python, if there is one, that is not the mean over a batch; it is called on the device.

    Raises:
        UsageError: it fails, does not return a scalar with a gradient, is not the mean over a batch, or has parameters
            to train.
    """
    if loss is None:
        return
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(4, workload.classes, generator=generator), torch.arange(4) % workload.classes
    several = workload.task == "multi-label"
    if workload.mixed or several:
        labels = F.one_hot(labels, workload.classes).float()
    if workload.mixed:
        labels = labels.lerp_(torch.tensor(1 / workload.classes), 0.5)
    require_mean(loss, logits.to(device), labels.to(device))


def require_mean(loss: Loss, logits: Tensor, labels: Tensor) -> None:
    """Refuse a loss that is not the mean over images, by outputs (B, ...) and targets (B, ...); B is even.

    Raises:
        UsageError: it fails, does not return a scalar with a gradient, is not the mean, or has parameters to train.
    """
    if not callable(loss):
        raise UsageError(f"loss= is {loss!r}; pass a function of logits and labels.")
    if isinstance(loss, nn.Module) and any(each.requires_grad for each in loss.parameters()):
        raise UsageError("loss= has parameters, which would not be trained; make them part of the model.")
    logits, half = logits.requires_grad_(), len(logits) // 2
    whole = _value(loss, logits, labels)
    halves = [_value(loss, logits[part], labels[part]) for part in (slice(half), slice(half, None))]
    if abs(whole - sum(halves) / 2) > 1e-4 * max(abs(whole), 1e-4):
        raise UsageError(
            f"loss= is not the mean over the images of a batch: it is {whole:.4g} for {2 * half} images, and "
            f"{halves[0]:.4g} and {halves[1]:.4g} for half of them each. Return the mean, because micro-batches are "
            "weighted by their images; class_weights= of snugfit.plan weights classes."
        )


def _value(loss: Loss, logits: Tensor, labels: Tensor) -> float:
    """The loss of logits (B, classes) and labels (B,)."""
    kind = "probabilities" if labels.is_floating_point() else "labels"
    what = f"for logits of shape {tuple(logits.shape)} and {kind} of shape {tuple(labels.shape)}"
    try:
        found = loss(logits, labels)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(f"loss= failed {what}: {reason_of(error)}.") from error
    if not (isinstance(found, Tensor) and found.dim() == 0 and found.requires_grad):
        shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        detached = " without a gradient" if isinstance(found, Tensor) and not found.requires_grad else ""
        raise UsageError(f"loss= returned {shown}{detached} {what}; return the mean loss, a tensor without dimensions.")
    return float(found.detach())
