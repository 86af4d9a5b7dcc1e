"""What a step is told to take without running it, by hand."""

import pytest
from strategy_samples import HARDWARE, workload
from torch import nn

from snugfit._chain import Chain
from snugfit.profiling import Probe
from snugfit.strategies.backprop.strategy import Backprop
from snugfit.strategies.blockwise.strategy import Blockwise
from snugfit.strategies.elastic.strategy import Elastic

WIDE = 4 * (128 * 128 * 9 + 128)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [(Backprop(), "network"), (Blockwise(local_loss="lls", module_units="1"), "unit:2"), (Elastic(), "elastic:full")],
)
def test_a_gradient_on_small_maps_is_in_memory_once(strategy, name):
    """The wide layer's weights, its momentum and its gradient, and a tenth for all else.

    Autograd copies a gradient whose layout is not that of its weight: floors had it twice.
    """
    layers = nn.Sequential(
        nn.Conv2d(3, 128, 3, stride=4, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    chain = Chain.from_module(layers.to("meta"), (3, 8, 8))
    probes = {each.name: each for each in strategy.probes(workload(), chain, HARDWARE) if isinstance(each, Probe)}
    assert workload().optimizer.state_per_parameter == 1
    assert 3 * WIDE <= probes[name].floor(2) <= 3.3 * WIDE
