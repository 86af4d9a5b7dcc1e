"""Group lasso on channels (PruneTrain section 4): the penalty that drives whole channels to zero, and its gradient.

The penalty is the sum, over the channels of every group and every convolution or linear weight that makes or reads
them, of the Euclidean norm of the channel's part of that weight: output-channel and input-channel groups as in the
paper, for the channels that can be removed. Biases and BatchNorm are not penalised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from snugfit.errors import UsageError
from snugfit.surgery.channels import ChannelGroup, Slot, by_channel, channel_norms

DEFAULT_RATIO = 0.2
"""Share of the scaled penalty in the whole loss at the start (PruneTrain section 4)."""


def penalised_weights(module: nn.Module, groups: Iterable[ChannelGroup]) -> dict[str, tuple[Slot, ...]]:
    """Penalised weights by name, and the dimensions of their groups.

    A weight between two groups belongs to both: its output channels are one set of terms, its input channels another.
    """
    parameters = dict(module.named_parameters())
    found: dict[str, tuple[Slot, ...]] = {}
    for group in groups:
        for slot in (*group.producers, *group.readers):
            if parameters[slot.tensor].dim() > 1:
                found[slot.tensor] = (*found.get(slot.tensor, ()), slot)
    return found


def penalty(module: nn.Module, groups: Iterable[ChannelGroup]) -> float:
    """The sum of the channels' norms, not yet scaled."""
    parameters = dict(module.named_parameters())
    terms = [(parameters[name], slot) for name, slots in penalised_weights(module, groups).items() for slot in slots]
    return float(sum(channel_norms(weight, slot).sum() for weight, slot in terms))


def penalty_scale(loss: float, penalty: float, ratio: float = DEFAULT_RATIO) -> float:
    """Factor for the penalty, such that ``ratio = scaled penalty / (loss + scaled penalty)`` (PruneTrain section 4).

    It is computed once, from the first loss and the penalty of the first weights.

    Raises:
        UsageError: the ratio is not in [0, 1), the loss is not a finite number from 0, or there is no penalty to scale.
    """
    if not 0 <= ratio < 1:
        raise UsageError(f"the penalty's share of the loss must be at least 0 and below 1, not {ratio}.")
    if not (math.isfinite(loss) and loss >= 0):
        raise UsageError(f"a penalty cannot be scaled by a loss of {loss}; pass the first batch's cross entropy.")
    if not (math.isfinite(penalty) and penalty > 0):
        raise UsageError(f"a penalty of {penalty} cannot be scaled: the network has no channels to remove.")
    return ratio * loss / ((1 - ratio) * penalty)


def add_penalty_gradient(parameter: nn.Parameter, slots: Sequence[Slot], scale: float) -> None:
    """Add the gradient of ``scale`` times the penalty to one parameter's ``.grad``, in place and without copies of it.

    A channel's part w of a weight adds ``scale * w / |w|``; zero adds nothing. A parameter that is frozen, or has no
    gradient, is left unchanged. It may be called from the hook that follows the accumulation of the gradient. ``slots``
    is the parameter's entry in :func:`penalised_weights`.
    """
    if not parameter.requires_grad or parameter.grad is None:
        return
    weight = parameter.detach()
    for slot in slots:
        norms = channel_norms(weight, slot)
        factors = torch.where(norms > torch.finfo(norms.dtype).tiny, scale / norms, torch.zeros_like(norms))
        blocks = by_channel(weight, slot)
        shape = [-1 if dim == slot.dim else 1 for dim in range(blocks.dim())]
        by_channel(parameter.grad, slot).addcmul_(blocks, factors.view(shape))


def add_penalty_gradients(module: nn.Module, groups: Iterable[ChannelGroup], scale: float) -> None:
    """:func:`add_penalty_gradient` for every weight: between ``loss.backward()`` and the optimizer's step."""
    parameters = dict(module.named_parameters())
    for name, slots in penalised_weights(module, groups).items():
        add_penalty_gradient(parameters[name], slots, scale)
