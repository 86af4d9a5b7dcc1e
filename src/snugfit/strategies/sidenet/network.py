"""The network that ``sidenet`` trains: its side network, trained parameters, and storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import fx, nn

from snugfit._chain import Chain
from snugfit._core.workload import Workload
from snugfit._training.network import NetworkTrainer
from snugfit._training.seeding import derive_seed
from snugfit._upstream import to_channels_last
from snugfit.lean import (
    disable_inplace,
    enable_inplace,
    release_images,
    retain_images,
    run_per_sample,
    store_int8,
)
from snugfit.strategies.full_network import MakeTrainer
from snugfit.strategies.sidenet.config import SidenetScheme as Scheme
from snugfit.strategies.sidenet.configurations import Configuration
from snugfit.strategies.sidenet.frozen import FrozenNetwork
from snugfit.strategies.sidenet.trainer import SIDE_PREFIX, FrozenTrainer
from snugfit.surgery import attach_side_network

SIDE_LR = 5.0
"""Learning rate of the side network over that of the classifier, as in Rep-Net's scripts for MobileNetV2."""

PruneNetwork = Callable[[nn.Module], object]
"""Replaces the blocks of a full network by the pruned ones, in place."""


def trained_names(names: Iterable[str], classifier: Iterable[str], scheme: Scheme) -> set[str]:
    """Names of the parameters that a scheme trains.

    These are the classifier and, in addition, either every ``bias`` (TinyTL's bias variant), those of BatchNorm
    included, or the side network.
    """
    head = set(classifier)
    if scheme == "bias+head":
        return head | {name for name in names if name.rpartition(".")[2] == "bias"}
    return head | {name for name in names if name.startswith(SIDE_PREFIX)}


def make_trainer(
    configuration: Configuration, frozen: FrozenNetwork, side_lr: float | None, prune: PruneNetwork | None = None
) -> MakeTrainer:
    """Factory of trainers of a chain's network in a configuration; their steps release their input images.

    Args:
        configuration: how the network is stored and run.
        frozen: the analysis of the network.
        side_lr: peak learning rate of the side network; :data:`SIDE_LR` times the workload's if None.
        prune: replaces the network's blocks by pruned ones; by default, the first channels stay.
    """

    def make(chain: Chain, module: nn.Module, workload: Workload, micro_batches: int) -> NetworkTrainer:
        if configuration.pruned:
            (prune or frozen.prune)(module)
        allowed = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        backbone = cast(fx.GraphModule, module)
        large = frozen.find_per_sample_blocks(backbone) if configuration.by_sample else []
        network = with_side_network(backbone, chain.input_shape, configuration.side_width, workload.seed)
        names = [name for name, _ in network.named_parameters() if name in allowed or name.startswith(SIDE_PREFIX)]
        trained = trained_names(names, frozen.classifier, frozen.scheme)
        lr = side_lr or SIDE_LR * workload.optimizer.lr
        trainer = FrozenTrainer(network, workload, trained, micro_batches, lr)
        if large:
            run_per_sample(network, {block.name: block.nodes for block in large})
        if configuration.int8:
            store_int8(network)
        enable_inplace(network)
        release_images(network)
        return trainer

    return make


def with_side_network(module: fx.GraphModule, input_shape: tuple[int, ...], width: float, seed: int) -> fx.GraphModule:
    """The network with a newly initialised side network of this width; unchanged if the width is 0."""
    if not width:
        return module
    torch.manual_seed(derive_seed(seed, "side"))
    network = attach_side_network(module, input_shape, width=width)
    to_channels_last(network)
    return network


def restore_layers(network: nn.Module) -> nn.Module:
    """Restore torch's layers in place, which run whole batches; int8 weights stay int8."""
    retain_images(cast(fx.GraphModule, network))
    run_per_sample(cast(fx.GraphModule, network), {})
    disable_inplace(network)
    return network
