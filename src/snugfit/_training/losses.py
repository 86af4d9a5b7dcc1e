"""Losses of a whole network that classifies, other than cross entropy: the focal loss, and those from Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

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
_MOST_VALUES = 1 << 18
"""Values of outputs by which a loss is tried on many images; with more, it is tried on four."""
_TRIED = 18
"""Images of which a loss is compared with the means of its parts."""
_MOST_CLASSES = 1000
"""With twice as many classes or more, a loss is tried on labels of so many of them."""
_PARTS = (2, 3)
"""Images of these parts. Parts of both sizes have equal weights only if all images have."""


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
    for labels in _labels_of_all(workload.classes):
        targets = labels
        if workload.mixed or workload.task == "multi-label":
            targets = F.one_hot(labels, workload.classes).float()
        if workload.mixed:
            targets.lerp_(torch.tensor(1 / workload.classes), 0.5)
        require_mean(loss, random_outputs((len(labels), workload.classes), device), targets.to(device))


def require_mean_for(loss: Loss, shape: tuple[int, ...], targets: Tensor, like: Tensor, ignored: int | None) -> None:
    """Refuse a loss that is not the mean over images, by an example's targets (B, ...) and by labels of all classes.

    Args:
        loss: from outputs (B, *shape), of the type and device of ``like`` (any shape), to the mean.
        shape: of the network's output for one image.
        targets: of the example; class labels if (B,) integers.
        like: any tensor of the network.
        ignored: the label that the loss leaves out, if any.

    Raises:
        UsageError: as :func:`require_mean`.
    """
    values = math.prod(shape)
    count = 60 if 60 * values <= _MOST_VALUES else 4  # 60 are divisible into parts of both sizes
    rows = torch.arange(count) % len(targets)
    if ignored is not None:  # a step that divides its images refuses these
        targets = targets.masked_fill(targets == ignored, int(ignored == 0))
    require_mean(loss, random_outputs((count, *shape), like.device, like.dtype), targets[rows].to(like.device))
    if len(shape) > 1 or targets.dim() > 1 or targets.is_floating_point():
        return
    known = min(values, int(targets.max()) + 1) if like.is_cuda else values  # others may end a GPU's context
    for labels in _labels_of_all(known, ignored):
        try:
            wrong = difference_from_mean(
                loss, random_outputs((len(labels), *shape), like.device, like.dtype), labels.to(like.device)
            )
        except UsageError:  # it takes no such labels: these are no classes
            return
        if wrong:
            raise UsageError(wrong)


def _labels_of_all(classes: int, without: int | None = None) -> Iterator[Tensor]:
    """Labels (18,) of some classes, until all had their turn; the first class is always among them.

    With 2,000 classes or more only every second, third ... class is tried, because all of 21,000 would take seconds.
    """
    every = torch.tensor([each for each in range(classes) if each != without])
    every = every[:: max(len(every) // _MOST_CLASSES, 1)]
    for some in every.split(_TRIED - 1):
        yield torch.cat((every[:1], some))[torch.arange(_TRIED) % (len(some) + 1)]


def random_outputs(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Outputs of any shape; their size grows with the image, so that means over many pixels of images differ, too."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return values.mul_(torch.linspace(0.2, 2, len(values)).view(-1, *[1] * (len(shape) - 1))).to(device)


def require_mean(loss: Loss, logits: Tensor, labels: Tensor) -> None:
    """Refuse a loss that is not the mean over images, by outputs (B, ...) and targets (B, ...); B is even, and above 2.

    Raises:
        UsageError: it fails, does not return a scalar with a gradient, is not the mean, or has parameters to train.
    """
    if not callable(loss):
        raise UsageError(f"loss= is {loss!r}; pass a function of logits and labels.")
    if isinstance(loss, nn.Module) and any(each.requires_grad for each in loss.parameters()):
        raise UsageError("loss= has parameters, which would not be trained; make them part of the model.")
    if wrong := difference_from_mean(loss, logits, labels):
        raise UsageError(wrong)


def difference_from_mean(loss: Loss, logits: Tensor, labels: Tensor) -> str:
    """How a loss of outputs (B, ...) and targets (B, ...) differs from the mean of its parts; empty if it does not."""
    whole = _value(loss, logits.requires_grad_(), labels)
    limit = max(1e-4, 4 * torch.finfo(logits.dtype).eps) * max(abs(whole), 1e-4)
    for size in _PARTS:
        for first in range(2) if len(logits) % size == 0 else ():
            parts = torch.arange(len(logits), device=logits.device).roll(first).split(size)
            mean = sum(_value(loss, logits[rows], labels[rows]) for rows in parts) / len(parts)
            if math.isfinite(whole) and not abs(whole - mean) <= limit:
                return (
                    f"loss= is not the mean over the images of a batch: it is {whole:.4g} for {len(logits)} images, "
                    f"and {mean:.4g} on average for {size} of them each. Return the mean, because micro-batches are "
                    "weighted by their images; class_weights= of snugfit.plan weights classes."
                )
    return ""


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
