"""The network that ``sidenet`` trains: what is added to the backbone, and which parameters train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import fx, nn

from snugfit.chain import Chain, classifier_names
from snugfit.core.request import Scheme
from snugfit.core.workload import Workload
from snugfit.strategies.sidenet.configurations import Configuration
from snugfit.strategies.sidenet.trainer import SIDE, FrozenTrainer
from snugfit.strategies.whole import MakeTrainer
from snugfit.surgery.sidenet import attach_side_network
from snugfit.training.network import NetworkTrainer
from snugfit.training.seeding import derive_seed


def trained_names(names: Iterable[str], classifier: Iterable[str], scheme: Scheme) -> set[str]:
    """Names of the parameters that a scheme trains.

    The classifier always; beside it every ``bias`` (TinyTL's bias variant), BatchNorm's among them, or what belongs to
    the side network.
    """
    head = set(classifier)
    if scheme == "bias+head":
        return head | {name for name in names if name.rpartition(".")[2] == "bias"}
    return head | {name for name in names if name.startswith(SIDE)}


def make_trainer(configuration: Configuration, scheme: Scheme, side_lr: float | None) -> MakeTrainer:
    """What makes the trainer of a chain's network in a configuration.

    Args:
        configuration: how the network is kept and run.
        scheme: what trains.
        side_lr: peak learning rate of the side network; :data:`SIDE_LR` times the workload's where it is None.
    """

    def make(chain: Chain, module: nn.Module, workload: Workload, micro_batches: int) -> NetworkTrainer:
        allowed = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        classifier = classifier_names(chain)
        network = with_side_network(module, chain.input_shape, configuration.side_width, workload.seed)
        names = [name for name, _ in network.named_parameters() if name in allowed or name.startswith(SIDE)]
        lr = side_lr or SIDE_LR * workload.optimizer.lr
        return FrozenTrainer(network, workload, trained_names(names, classifier, scheme), micro_batches, lr)

    return make


SIDE_LR = 5.0
"""Learning rate of the side network over the classifier's, as in Rep-Net's scripts for MobileNetV2."""


def with_side_network(module: nn.Module, input_shape: tuple[int, ...], width: float, seed: int) -> nn.Module:
    """The network with a side network of this width beside it, freshly initialised; as it is where the width is 0."""
    if not width:
        return module
    torch.manual_seed(derive_seed(seed, "side"))
    network = attach_side_network(cast(fx.GraphModule, module), input_shape, width=width)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network
