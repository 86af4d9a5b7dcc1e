"""Units with their local losses: copies for probes, resident bytes, and initial weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

from snugfit._core.workload import Workload
from snugfit.local import LocalLoss
from snugfit.local.assignment import DetachedHeadLoss, HeadLoss, Layout


def clone_unit(layout: Layout, index: int) -> tuple[nn.Module, LocalLoss]:
    """Independent copies of a unit and its local loss, on the meta device."""
    return copy.deepcopy(layout.chain.units[index].module), copy.deepcopy(layout.make_loss(index))


def kept_bytes(layout: Layout, index: int, workload: Workload) -> int:
    """Bytes of a unit between two of its steps: weights, buffers, local loss, optimizer state."""
    unit, loss = layout.chain.units[index].module, layout.make_loss(index)
    copies = 1 + workload.optimizer.state_per_parameter
    weights = sum(parameter.nbytes for module in (unit, loss) for parameter in module.parameters())
    return weights * copies + sum(buffer.nbytes for module in (unit, loss) for buffer in module.buffers())


def loss_without_head(loss: LocalLoss) -> LocalLoss | None:
    """A unit's local loss without the network's head; None if the head is all of it."""
    if isinstance(loss, DetachedHeadLoss):
        return loss.local
    return None if isinstance(loss, HeadLoss) else loss


def initialise_loss(loss: nn.Module, seed: int) -> None:
    """Initialise a local loss from the meta device; the weights depend only on the seed."""
    loss.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in loss.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
