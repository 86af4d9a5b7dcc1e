"""Activation memory of any traced network, block by block: by the paper's rule, and by liveness."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from itertools import chain

import torch
from torch import fx, nn

from snugfit.memory.activation import ActivationMemory, add_up
from snugfit.profiling.analytic import analytic_parameter_bytes, analytic_records
from snugfit.profiling.block_members import find_members
from snugfit.profiling.liveness import StepOptions, liveness_records, sampled_nodes
from snugfit.profiling.meta_profiler import profile_on_meta


@dataclass(frozen=True)
class Resident:
    """Memory that is in use during the whole step, in bytes.

    Attributes:
        weights: weights and buffers, as stored.
        gradients: of the trained weights, if they accumulate over micro-batches.
        optimizer: state of the optimizer.
    """

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.weights + self.gradients + self.optimizer


def analytic_activation_memory(
    module: fx.GraphModule,
    input_shape: tuple[int, ...],
    trains: Set[str],
    *,
    batch: int = 1,
    side_first: bool = False,
) -> ActivationMemory:
    """Activation memory by the paper's rule (Yoosefi et al., equations 1 to 6): bytes of blocks are per image.

    Args:
        module: a traced network, with or without a side network; may be on meta.
        input_shape: channels, height, width of one image.
        trains: names of the trained parameters.
        batch: images of a step.
        side_first: whether a side module runs before its block, as in Rep-Net's code; else after it, which gives the
            paper's figure.
    """
    members = find_members(module, input_shape)
    records = analytic_records(module, input_shape, trains, members, side_first=side_first)
    return add_up(members.names, records, parameter_bytes=analytic_parameter_bytes(module, trains), batch=batch)


def liveness_activation_memory(
    module: fx.GraphModule, input_shape: tuple[int, ...], trains: Set[str], options: StepOptions | None = None
) -> ActivationMemory:
    """Activation memory by the liveness of tensors: bytes of blocks are of the whole batch, including the batch itself.

    Each layer is measured as it is, lean or stock, in its current mode. Workspace inside an operator is not a tensor
    and does not count.

    Args:
        module: a traced network, with or without a side network, possibly on meta; it is not changed.
        input_shape: channels, height, width of one image.
        trains: names of the trained parameters.
        options: how a step runs; the defaults if None.

    Raises:
        ValueError: a BatchNorm layer in training mode has a single value per channel, as with one image of one pixel.
    """
    step, members = options or StepOptions(), find_members(module, input_shape)
    operators = profile_on_meta(module, input_shape, trains, step.batch, sampled_nodes(members, step.by_sample))
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    image_bytes = step.batch * math.prod(input_shape) * dtype.itemsize
    records = liveness_records(operators, members, image_bytes, step)
    resident = resident_bytes(
        module, trains, state_copies=step.state_copies, holds_gradients=step.holds_gradients, int8=step.int8
    )
    return add_up(members.names, records, parameter_bytes=resident.total, batch=step.batch, images=step.batch)


def resident_bytes(
    module: nn.Module, trains: Set[str], *, state_copies: int, holds_gradients: bool = False, int8: bool = False
) -> Resident:
    """Memory of a network's weights during the whole step; see :func:`liveness_activation_memory`."""
    weights = trained = 0
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if name in trains:
            trained += tensor.nbytes
        coded = int8 and tensor.dim() > 1 and tensor.is_floating_point() and name not in trains
        weights += _int8_bytes(tensor) if coded else tensor.nbytes
    return Resident(weights, trained if holds_gradients else 0, state_copies * trained)


def _int8_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight (K, ...) in 8 bits: one per value, and one float per output channel."""
    return weight.numel() + weight.shape[0] * weight.element_size()
