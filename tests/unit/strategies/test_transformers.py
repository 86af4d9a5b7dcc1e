"""Vision transformers: strategies that keep the whole network train them, and local losses say that they cannot."""

import copy

import pytest
import torch
from strategy_samples import HARDWARE, workload

from snugfit._chain import Chain
from snugfit._models.vit import VisionTransformer
from snugfit.strategies.backprop.strategy import Backprop
from snugfit.strategies.blockwise.strategy import Blockwise
from snugfit.strategies.checkpoint.strategy import Checkpoint


@pytest.fixture
def chain():
    with torch.device("meta"):
        model = VisionTransformer(10, 32, 3, layers=2, heads=2, width=8, hidden=16)
        return Chain.from_module(model, (3, 32, 32), "vit")


def test_local_losses_refuse_tokens(chain):
    (reason,) = Blockwise().validate(workload(), chain, HARDWARE)
    assert reason == "unit conv_proj gives 5x8 values per image, but local losses require feature maps or vectors"


@pytest.mark.parametrize("kind", [Backprop, Checkpoint])
def test_a_step_of_the_whole_network_runs_and_leaves_the_chain_empty(chain, kind):
    strategy, before = kind(), copy.deepcopy(chain)
    work = workload()
    assert strategy.validate(work, chain, HARDWARE) == []
    for probe in strategy.probes(work, chain, HARDWARE):
        assert probe.floor(2) > 0
        probe.build()(2)
    assert all(p.is_meta for owner in (chain, before) for unit in owner.all_units for p in unit.module.parameters())
