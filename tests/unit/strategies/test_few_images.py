"""Batch norms that train take two images at least, in every strategy, unless the whole batch is one."""

import pytest
from strategy_samples import HARDWARE, workload
from torch import nn

from snugfit._chain import Chain
from snugfit.profiling import Probe, smallest_floor
from snugfit.strategies.backprop.strategy import Backprop
from snugfit.strategies.blockwise.strategy import Blockwise
from snugfit.strategies.checkpoint.strategy import Checkpoint
from snugfit.strategies.elastic.strategy import Elastic
from snugfit.strategies.feedback.strategy import Feedback
from snugfit.strategies.sidenet.strategy import Sidenet
from snugfit.strategies.tiled.strategy import Tiled

STRATEGIES = [Backprop(), Checkpoint(), Blockwise(local_loss="lls", module_units="1"), Tiled(tiles="2x2"), Feedback()]


def chain_of(norm=nn.BatchNorm2d):
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), norm(4), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    return Chain.from_module(layers.to("meta"), (3, 8, 8))


def fewest(strategy, chain, **settings):
    probes = strategy.probes(workload(**settings), chain, HARDWARE)
    return {smallest_floor(each.floor)[0] for each in probes if isinstance(each, Probe)}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_norms_of_a_batch_take_no_single_image(strategy):
    """A single image of several has too few values per channel; a batch size of 1 is what the user asked for."""
    assert fewest(strategy, chain_of(), batch_size=4) == {2}
    assert fewest(strategy, chain_of(), batch_size=1) == {1}
    assert fewest(strategy, chain_of(nn.InstanceNorm2d), batch_size=4) == {1}


def test_norms_of_the_side_network_take_no_single_image():
    blocks = [(3, 4, 1), (4, 4, 2), (4, 4, 2), (4, 4, 1)]
    layers = [nn.Sequential(nn.Conv2d(i, o, 3, s, 1), nn.BatchNorm2d(o), nn.ReLU()) for i, o, s in blocks]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    chain = Chain.from_module(network.to("meta"), (3, 16, 16))
    assert fewest(Sidenet(prune="off"), chain, batch_size=4) == {2}
    assert fewest(Sidenet(prune="off"), chain, batch_size=1) == {1}


def test_frozen_norms_take_any_batch():
    assert fewest(Elastic(), chain_of(), batch_size=4) == {1}
