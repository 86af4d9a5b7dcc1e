"""Activation memory of MobileNetV2 with a side network, kept and run in several ways: by rule, truly, and measured."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from benchmarks.common import Cell
from snugfit import _models as models
from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit.lean import enable_inplace, use_lean
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling.activation import analytic_activation_memory, resident_bytes
from snugfit.strategies.memory_estimates import fill_synthetic_weights, random_batch
from snugfit.strategies.sidenet.configurations import Configuration
from snugfit.strategies.sidenet.frozen import FrozenNetwork
from snugfit.strategies.sidenet.network import make_trainer, trained_names, with_side_network

CONFIGURATIONS: dict[str, Configuration] = {
    "as it is (Rep-Net)": Configuration(1.0),
    "image by image": Configuration(1.0, by_sample=True),
    "pruned": Configuration(1.0, pruned=True),
    "int8": Configuration(1.0, int8=True),
    "image by image, int8": Configuration(1.0, by_sample=True, int8=True),
    "pruned, int8": Configuration(1.0, pruned=True, int8=True),
    "pruned, image by image, int8": Configuration(1.0, pruned=True, int8=True, by_sample=True),
}
PAPERS_RATIOS = (0.3, 0.78, 0.46, 0.46)
"""Of blocks 1 to 4, chosen by hand (Yoosefi et al., section V)."""


@dataclass(frozen=True)
class Subject:
    """A network with a side network that is to be measured in several ways.

    Attributes:
        chain: the backbone, on the meta device.
        frozen: what is known of it.
        workload: batch size and optimizer.
    """

    chain: Chain
    frozen: FrozenNetwork
    workload: Workload

    @classmethod
    def of(cls, model: str, image_size: int, classes: int, batch: int) -> Subject:
        """A model by name."""
        shape = (3, image_size, image_size)
        with torch.device("meta"):
            chain = Chain.from_module(models.build(model, classes, image_size), shape, model)
        adam = OptimizerSettings("adamw", lr=1e-4, weight_decay=0.0)
        workload = Workload(model, "made-up", shape, classes, 1000, 1, 1, batch_size=batch, optimizer=adam)
        return cls(chain, FrozenNetwork(chain, "rep-net", 1.0, "on"), workload)

    def measure(self, configuration: Configuration) -> Cell:
        """The analytic figures and the measured ones."""
        network, trains = self._on_meta(configuration)
        batch, shape = self.workload.batch_size, self.workload.input_shape
        rule = analytic_activation_memory(network, shape, trains, batch=batch)
        copies = self.workload.optimizer.state_per_parameter
        resident = resident_bytes(network, trains, state_copies=copies, int8=configuration.int8)
        return {
            "rule": {"peak": rule.peak_bytes, "block": rule.peak_block, "kept": rule.cumulative_bytes,
                     "total": rule.total_bytes},
            **self._measured(configuration, resident.total),
        }  # fmt: skip

    def _on_meta(self, configuration: Configuration) -> tuple[fx.GraphModule, set[str]]:
        module = cast(fx.GraphModule, copy.deepcopy(self.chain).to_module())
        if configuration.pruned:
            self.frozen.prune(module)
        network = with_side_network(module, self.chain.input_shape, configuration.side_width, 0)
        names = [name for name, _ in network.named_parameters()]
        trains = trained_names(names, self.frozen.classifier, self.frozen.scheme)
        trainer = _trainer(network, trains)
        return trainer, trains

    def _measured(self, configuration: Configuration, resident: int) -> dict[str, int]:
        clone = copy.deepcopy(self.chain)
        module = clone.to_module()
        fill_synthetic_weights(module.to_empty(device="cpu"))
        trainer = make_trainer(configuration, self.frozen, None)(clone, module, self.workload, 1)

        def step() -> None:
            trainer.step(*random_batch(clone.input_shape, self.workload.classes, self.workload.batch_size, "cpu"))

        peak = tensor_peak_bytes(step, [trainer.module], repeats=2)
        return {"measured_total": peak, "measured_activations": peak - resident}

    @property
    def ratios(self) -> dict[str, tuple[int, int]]:
        """Channels before and after, of every group that loses some."""
        return self.frozen.width_changes


def _trainer(network: fx.GraphModule, trains: set[str]) -> fx.GraphModule:
    """The network in the modes and with the operators that it trains with."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trains)
    use_lean(network)
    network.train()
    for name, layer in network.named_modules():
        if isinstance(layer, nn.BatchNorm2d) and not name.startswith("side."):
            layer.eval()
    enable_inplace(network)
    return network


def table(subject: Subject) -> dict[str, Any]:
    """Every configuration."""
    return {name: subject.measure(configuration) for name, configuration in CONFIGURATIONS.items()}
