"""The floor of the importance pass against the tensors of a real pass."""

import copy

import pytest
import torch
from small_networks import workload
from torch import nn

from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings
from snugfit.memory.scratch import ScratchFile
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.selection.importance import importance, scratch_bytes
from snugfit.strategies.elastic.probes import ElasticProbes, _with_synthetic_weights, trial_updates

SETTINGS = OptimizerSettings("sgd", lr=0.1, momentum=0.9)


class Growing(nn.Module):
    """A residual unit whose last weight is its largest."""

    def __init__(self, channels):
        super().__init__()
        few, more, most = channels
        self.first, self.second = nn.Conv2d(few, more, 3, padding=1), nn.Conv2d(more, most, 3, padding=1)
        self.side = nn.Conv2d(few, most, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) + self.side(x)


@pytest.mark.parametrize("channels", [(64, 128, 256), (64, 128, 64)])
def test_no_pass_takes_less_than_its_floor(channels, tmp_path, monkeypatch):
    monkeypatch.setattr("snugfit.selection.importance.PART_VALUES", 1000)
    network = nn.Sequential(Growing(channels), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[2], 10))
    chain = Chain.from_module(network.to("meta"), (64, 2, 2))
    probes = ElasticProbes(chain, workload(4, SETTINGS, (64, 2, 2)), "cpu", lean=True)
    probe = probes._importance(2)
    units = copy.deepcopy(chain)
    _with_synthetic_weights(units.to_module().to_empty(device="cpu"), lean=True)
    modules = [unit.module.eval() for unit in units.all_units]
    size = scratch_bytes(modules, [unit.input_shape for unit in units.all_units], 2)
    images = torch.randn(2, 64, 2, 2).contiguous(memory_format=torch.channels_last)

    def once():
        with ScratchFile(tmp_path / "scratch", size) as scratch:
            options = {"chunk": 2, "scratch": scratch, "update": trial_updates(SETTINGS)}
            importance("contribution", modules, images, torch.tensor([0, 1]), **options)

    peak = tensor_peak_bytes(once, [*modules, images])
    assert 0.8 * peak <= probe.floor(2) <= peak
