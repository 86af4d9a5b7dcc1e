"""Activation memory of any traced network, block by block: the paper's figure, and the true one."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from itertools import chain

import torch
from torch import fx, nn

from snugfit.memory.activation import ActivationMemory, add_up
from snugfit.profiling.analytic import paper_parameter_bytes, paper_records
from snugfit.profiling.block_members import find_members
from snugfit.profiling.liveness import StepOptions, sampled_nodes, true_records
from snugfit.profiling.meta_profiler import profile_on_meta


@dataclass(frozen=True)
class Resident:
    """What is in memory for the whole of a step, in bytes.

    Attributes:
        weights: weights and buffers as they are stored.
        gradients: of the weights that train, where they accumulate over micro-batches.
        optimizer: its state.
    """

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.weights + self.gradients + self.optimizer


def paper_activation_memory(
    module: fx.GraphModule,
    input_shape: tuple[int, ...],
    trains: Set[str],
    *,
    batch: int = 1,
    side_first: bool = False,
) -> ActivationMemory:
    """Activation memory by the paper's rule (Yoosefi et al., equations 1 to 6): bytes of blocks are per image.

    Args:
        module: a traced network, with or without a side network; meta will do.
        input_shape: channels, height, width of one image.
        trains: names of the parameters that train.
        batch: images of a step.
        side_first: whether a side module runs ahead of its block, as in Rep-Net's code; else after it, which gives the
            paper's figure.
    """
    members = find_members(module, input_shape)
    records = paper_records(module, input_shape, trains, members, side_first=side_first)
    return add_up(members.names, records, parameter_bytes=paper_parameter_bytes(module, trains), batch=batch)


def true_activation_memory(
    module: fx.GraphModule, input_shape: tuple[int, ...], trains: Set[str], options: StepOptions | None = None
) -> ActivationMemory:
    """Activation memory as the allocator has it: bytes of blocks are of the whole batch, the batch itself included.

    Each layer is taken as it is, lean or stock, in the mode that it is in. Workspace inside an operator is not a tensor
    and does not count.

    Args:
        module: a traced network, with or without a side network; meta will do, and it is not changed.
        input_shape: channels, height, width of one image.
        trains: names of the parameters that train.
        options: how a step runs; the defaults if None.

    Raises:
        ValueError: a BatchNorm layer in training mode has a single value per channel, as with one image of one pixel.
    """
    step, members = options or StepOptions(), find_members(module, input_shape)
    operators = profile_on_meta(module, input_shape, trains, step.batch, sampled_nodes(members, step.by_sample))
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    image_bytes = step.batch * math.prod(input_shape) * dtype.itemsize
    records = true_records(operators, members, image_bytes, step)
    resident = resident_bytes(
        module, trains, state_copies=step.state_copies, holds_gradients=step.holds_gradients, int8=step.int8
    )
    return add_up(members.names, records, parameter_bytes=resident.total, batch=step.batch, images=step.batch)


def resident_bytes(
    module: nn.Module, trains: Set[str], *, state_copies: int, holds_gradients: bool = False, int8: bool = False
) -> Resident:
    """What of a network's weights is in memory for the whole of a step; see :func:`true_activation_memory`."""
    weights = trained = 0
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if name in trains:
            trained += tensor.nbytes
        coded = int8 and tensor.dim() > 1 and tensor.is_floating_point() and name not in trains
        weights += _int8_bytes(tensor) if coded else tensor.nbytes
    return Resident(weights, trained if holds_gradients else 0, state_copies * trained)


def _int8_bytes(weight: torch.Tensor) -> int:
    """One byte per value, and one float per output channel."""
    return weight.numel() + weight.shape[0] * weight.element_size()
