"""Layers whose buffers a training pass changes: they may not run again, nor belong to a frozen network."""

import pytest
import torch
from strategy_samples import HARDWARE, workload
from torch import nn

from snugfit._chain import Chain
from snugfit.strategies.blockwise.strategy import Blockwise
from snugfit.strategies.elastic.strategy import Elastic
from snugfit.strategies.elastic.trainer import set_modes
from snugfit.strategies.sidenet.configurations import Configuration
from snugfit.strategies.sidenet.frozen import FrozenNetwork
from snugfit.strategies.sidenet.network import make_trainer
from snugfit.strategies.sidenet.strategy import Sidenet

SHAPE = (3, 8, 8)


class Averaging(nn.Module):
    """Keeps a running mean of its input, as no layer of torch does."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        return x


def instance_norm(channels):
    return nn.InstanceNorm2d(channels, affine=True, track_running_stats=True)


def network(norm):
    torch.manual_seed(0)
    layers = []
    for channels in (3, 8, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), norm(8), nn.ReLU()]
    return Chain.from_module(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)), SHAPE)


@pytest.mark.parametrize("strategy", [Elastic(), Sidenet(scheme="head")])
def test_strategies_with_a_frozen_part_refuse_changing_buffers(strategy):
    (reason,) = strategy.validate(workload(), network(Averaging), HARDWARE)
    assert "the buffer '1.mean' changes in every forward pass" in reason
    for norm in (nn.BatchNorm2d, instance_norm):
        assert strategy.validate(workload(), network(norm), HARDWARE) == []


@pytest.mark.parametrize(("norm", "recomputes"), [(Averaging, False), (instance_norm, True), (nn.BatchNorm2d, True)])
def test_modules_run_units_again_only_if_that_changes_no_buffer(norm, recomputes):
    with torch.device("meta"):
        chain = network(norm)
    probes = Blockwise().probes(workload(), chain, HARDWARE)
    assert len(probes) > 1
    assert any("(" in probe.name for probe in probes) == recomputes


def test_statistics_of_instance_norms_stay_where_those_of_batch_norms_do():
    module = network(instance_norm).to_module()
    set_modes(module)
    norms = [layer for layer in module.modules() if isinstance(layer, nn.InstanceNorm2d)]
    assert len(norms) == 4 and not any(norm.training for norm in norms)
    chain = network(instance_norm)
    make = make_trainer(Configuration(0.0), FrozenNetwork(network(instance_norm), "head", 0.0, "on"), None)
    trainer = make(chain, chain.to_module(), workload(batch_size=4), 1)
    before = {name: each.clone() for name, each in trainer.module.state_dict().items()}
    trainer.step(torch.randn(4, *SHAPE), torch.randint(0, 10, (4,)))
    after = trainer.module.state_dict()
    assert {name for name, each in before.items() if not torch.equal(each, after[name])} == {"14.weight", "14.bias"}
