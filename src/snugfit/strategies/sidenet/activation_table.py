"""Activation memory of a network by block, by the paper's rule; and the measured peak of a step."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from snugfit._chain import Chain, classifier_names
from snugfit._core.option_groups import Trained
from snugfit._core.serial import to_data
from snugfit._core.workload import Workload
from snugfit._training.optimizers import ParameterOptimizers
from snugfit._training.task import precision_context
from snugfit.errors import MEMORY_ERRORS, ModelError
from snugfit.lean import enable_inplace, release_images, use_lean
from snugfit.memory import MemoryLimit, is_out_of_memory, release_memory
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling.activation import analytic_activation_memory, resident_bytes
from snugfit.strategies.memory_estimates import TENSOR_TO_PROCESS, fill_synthetic_weights, random_batch
from snugfit.strategies.sidenet.config import SidenetScheme
from snugfit.strategies.sidenet.frozen import SIDE_PREFIX
from snugfit.strategies.sidenet.network import trained_names
from snugfit.surgery.sidenet import attach_side_network


@dataclass(frozen=True)
class TrainedNetwork:
    """A network on the meta device, its layers in the modes of training; and its trained part, also by names."""

    module: fx.GraphModule
    trained: Trained
    names: frozenset[str]


def activation_table(
    chain: Chain, workload: Workload, trained: Trained | None, limit: MemoryLimit, *, lean: bool = True
) -> dict[str, Any]:
    """Activation memory by the paper's rule, and measured in two steps on synthetic images.

    By default a side network trains if the model can have one, else everything. The limit is enforced during the
    measurement.

    Returns:
        The fields of :class:`snugfit.memory.activation.ActivationMemory` by the paper's rule, bytes of blocks per
        image, and these: ``trained``; ``side_first``, peak and total if side modules run before their blocks, as in
        Rep-Net's published code; ``resident``, bytes of weights and optimizer state in such a step; ``measured``,
        ``tensor_peak_bytes`` of a step, None if memory does not suffice.

    Raises:
        ModelError: ``trained`` is ``sidenet``, and no side network can be attached to the model.
    """
    shape, batch, prepared = workload.input_shape, workload.batch_size, prepare_network(chain, trained)
    network = copy.deepcopy(prepared.module)
    resident = resident_bytes(network, prepared.names, state_copies=workload.optimizer.state_per_parameter)
    if lean:
        use_lean(network)
        enable_inplace(network)
        if prepared.trained != "full":
            release_images(network)
    paper, ahead = (
        analytic_activation_memory(prepared.module, shape, prepared.names, batch=batch, side_first=first)
        for first in (False, True)
    )
    with limit:
        measured = _measured(network, workload, limit.device, batch * paper.peak_bytes + resident.total)
    return {
        **to_data(paper),
        "trained": prepared.trained,
        "side_first": {"peak_bytes": ahead.peak_bytes, "total_bytes": ahead.total_bytes},
        "resident": to_data(resident),
        "measured": {"batch": batch, "tensor_peak_bytes": measured},
    }


def prepare_network(chain: Chain, trained: Trained | None) -> TrainedNetwork:
    """The network for a choice of trained parameters, frozen BatchNorm in evaluation mode."""
    module: Any = copy.deepcopy(chain).to_module()
    if trained in (None, "sidenet"):
        try:
            module, trained = attach_side_network(module, chain.input_shape), "sidenet"
        except ModelError:
            if trained is not None:
                raise
            trained = "full"
    every = [name for name, _ in module.named_parameters()]
    scheme: SidenetScheme = "bias+head" if trained == "bias+head" else "head"
    names = frozenset(every if trained == "full" else trained_names(every, classifier_names(chain), scheme))
    module.train()
    for name, layer in module.named_modules():
        if isinstance(layer, _NormBase) and not name.startswith(SIDE_PREFIX):
            layer.eval()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in names)
    return TrainedNetwork(module, trained, names)


def _measured(module: nn.Module, workload: Workload, device: torch.device, expected_bytes: float) -> int | None:
    """Peak tensor bytes of two steps; None if they do not fit."""
    if device.type == "cpu" and expected_bytes * TENSOR_TO_PROCESS > psutil.virtual_memory().available:
        return None
    try:
        return step_peak(module, workload, device)
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
    release_memory()
    return None


def step_peak(module: nn.Module, workload: Workload, device: torch.device) -> int:
    """Peak tensor bytes of two steps on synthetic images and weights; the second step has optimizer state.

    Parameters that require gradients train; each gradient is applied and freed in the backward pass. Weights on the
    meta device get synthetic values on ``device``.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        fill_synthetic_weights(module.to_empty(device=device))
    optimizers = ParameterOptimizers(module.named_parameters(), workload.optimizer)
    optimizers.apply_in_backward()

    def step() -> None:
        images, labels = random_batch(workload.input_shape, workload.classes, workload.batch_size, str(device))
        with precision_context(images, workload.precision):
            loss = nn.functional.cross_entropy(module(images), labels)
        loss.backward()

    try:
        return tensor_peak_bytes(step, [module], repeats=2)
    finally:
        optimizers.release()
