"""The network that ``sidenet`` trains: its side network, trained parameters, storage, and trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from snugfit import lean
from snugfit._chain import Chain
from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import Deferred
from snugfit._training.network import NetworkTrainer, mismatch_errors
from snugfit._training.seeding import derive_seed
from snugfit._upstream import to_channels_last
from snugfit.errors import CheckpointError
from snugfit.strategies.full_network import MakeTrainer
from snugfit.strategies.sidenet.config import SidenetScheme
from snugfit.strategies.sidenet.configurations import Configuration
from snugfit.strategies.sidenet.frozen import SIDE_PREFIX, FrozenNetwork
from snugfit.surgery import adopt_widths, attach_side_network

SIDE_LR = 5.0
"""Learning rate of the side network over that of the classifier, as in Rep-Net's scripts for MobileNetV2."""


def trained_names(names: Iterable[str], classifier: Iterable[str], scheme: SidenetScheme) -> set[str]:
    """Names of the parameters that a scheme trains.

    These are the classifier and, in addition, either every ``bias`` (TinyTL's bias variant), those of BatchNorm
    included, or the side network.
    """
    head = set(classifier)
    if scheme == "bias+head":
        return head | {name for name in names if name.rpartition(".")[2] == "bias"}
    return head | {name for name in names if name.startswith(SIDE_PREFIX)}


class FrozenTrainer(NetworkTrainer):
    """Train some parameters by cross entropy; norms outside the side network keep their pre-trained statistics.

    Frozen parameters have no gradients and no optimizer state, and are not in checkpoints: they never change. Those
    of the side network have the peak learning rate ``side_lr``, the others that of the workload.
    """

    def __init__(
        self, module: nn.Module, workload: Workload, trained: Collection[str], micro_batches: int, side_lr: float
    ) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trained)
        lean.use_lean(module)
        self._norms = [
            layer
            for name, layer in module.named_modules()
            if isinstance(layer, _NormBase) and not name.startswith(SIDE_PREFIX)
        ]
        super().__init__(module, module, workload, micro_batches)
        ratio = side_lr / workload.optimizer.lr
        self.optimizers.scale_lr({name: ratio for name in self.optimizers.parameters if name.startswith(SIDE_PREFIX)})

    def train_mode(self) -> None:
        """Training mode, but norms of the frozen network in evaluation mode."""
        self.module.train()
        for norm in self._norms:
            norm.eval()

    def state(self) -> dict[str, dict[str, Tensor | Deferred]]:
        """Trained parameters, the side network's statistics, and optimizer state, in the shapes of the parameters."""
        return {"model": {**self._trained_tensors()}, "optimizer": {**self.optimizers.state()}}

    def _trained_tensors(self) -> dict[str, Tensor]:
        trained = self.optimizers.parameters
        return {
            name: tensor
            for name, tensor in self.module.state_dict().items()
            if name in trained or name.startswith(SIDE_PREFIX)
        }

    def load_state(self, load: Callable[[str], dict[str, Tensor]]) -> None:
        """Load a state, one group in memory at a time; shapes as in :meth:`state`.

        Raises:
            CheckpointError: the state is of another network.
        """
        weights = load("model")
        if strange := weights.keys() ^ self._trained_tensors().keys():
            raise CheckpointError(f"the checkpoint is of another model ({min(strange)}). Resume the run it belongs to.")
        with mismatch_errors():
            self.module.load_state_dict(weights, strict=False)
        del weights
        self.optimizers.load_state(load("optimizer"))


def make_trainer(
    configuration: Configuration,
    frozen: FrozenNetwork,
    side_lr: float | None,
    prune: Callable[[nn.Module], object] | None = None,
) -> MakeTrainer:
    """Factory of trainers of a chain's network in a configuration; their steps release their input images.

    The side network has :data:`SIDE_LR` times the workload's learning rate if ``side_lr`` is None. ``prune`` replaces a
    network's blocks by pruned ones in place; by default the first channels stay.
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
            lean.run_per_sample(network, {block.name: block.nodes for block in large})
        if configuration.int8:
            lean.store_int8(network)
        lean.enable_inplace(network)
        lean.release_images(network)
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
    lean.retain_images(cast(fx.GraphModule, network))
    lean.run_per_sample(cast(fx.GraphModule, network), {})
    lean.disable_inplace(network)
    return network


def side_network(chain: Chain, structure: dict[str, Any], classes: int, state: Mapping[str, Tensor]) -> nn.Module:
    """Rebuild the network of a run: the side network, and a backbone as wide as the saved tensors, of any shapes."""
    module = cast(fx.GraphModule, chain.to_module())
    if structure.get("pruned"):
        adopt_widths(module, state, chain.input_shape)
    width = structure.get("side_width")
    return attach_side_network(module, chain.input_shape, width=float(width)) if width else module
