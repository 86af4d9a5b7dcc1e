"""``--module-units auto``, the default: as few modules as fit, down to backpropagation, and a module per unit."""

import pytest
import torch
from strategy_samples import HARDWARE, MB, line, profile, workload
from torch import nn

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._training.network import NetworkTrainer
from snugfit.strategies.blockwise.strategy import Blockwise
from snugfit.strategies.blockwise.worker import LocalUnit

ALL, FIRST, REST, UNITS = "unit:a..c", "unit:a..b", "unit:c", ("unit:a", "unit:b", "unit:c")
PER_UNIT = ((0, 0, ""), (1, 1, ""), (2, 2, ""))
KEEPS_UNITS = [
    {"saturation_stop": True}, {"exit_tolerance": 0.02}, {"block_units": 2}, {"residency": "all"},
    {"loss_aim": "memory"},
]  # fmt: skip


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    ).double()  # fmt: skip


def chain():
    return Chain.from_module(layers().to("meta"), (3, 8, 8))


def proposed(sample_bytes, budget=None, **settings):
    """The first proposal for three units, by bytes per sample of each measured module."""
    lines = {name: line(0, size, name=name) for name, size in sample_bytes.items()}
    made = profile(lines, kept=dict.fromkeys(lines, 0), units=("a", "b", "c", "head"))
    strategy = Blockwise(local_loss="aan", module_units="auto", **settings)
    return next(strategy.propose(workload(), made, HARDWARE, Budget(budget)), None)


def test_it_is_the_default():
    assert Blockwise().module_units == "auto"


def test_the_default_goes_from_backpropagation_to_a_module_per_unit():
    sizes = {ALL: 9 * MB, FIRST: 5 * MB, REST: 4 * MB, "unit:a": MB, "unit:b": MB}
    found = {budget: proposed(sizes, budget * MB) for budget in (300, 120, 80)}
    assert [found[budget].modules for budget in found] == [((0, 2, ""),), ((0, 1, ""), (2, 2, "")), PER_UNIT]
    assert [found[budget].exact for budget in found] == [True, False, False]


def test_it_is_not_exact_before_it_has_modules():
    assert not Blockwise().exact


@pytest.mark.parametrize("settings", KEEPS_UNITS)
def test_options_of_exits_and_of_least_memory_keep_a_module_per_unit(settings):
    probes = Blockwise(local_loss="aan", **settings).probes(workload(), chain(), HARDWARE)
    assert [probe.name for probe in probes] == [f"unit:{unit.name}" for unit in chain().units]
    every = dict.fromkeys((ALL, *UNITS), MB)
    assert proposed(every, **settings).modules == PER_UNIT
    assert (
        Blockwise(local_loss="aan", **settings | {"module_units": "3"}).probes(workload(), chain(), HARDWARE)[1:] == []
    )


def test_other_options_do_not():
    for settings in ({}, {"exit_tolerance": 0.0}, {"adaptive_batch": False}, {"cache": "never"}, {"rho": 0.1}):
        assert proposed(dict.fromkeys((ALL, *UNITS), MB), **settings).modules == ((0, 2, ""),)


def test_measured_modules_train_at_a_smaller_batch_if_nothing_else_was_measured():
    """Later measurements leave memory behind, so that what fitted at 16 may fit no more."""
    assert proposed({FIRST: 5 * MB, REST: 5 * MB}, 70 * MB).blocks == ((0, 1, 12),)
    smaller = proposed(dict.fromkeys((FIRST, REST, "unit:a", "unit:b"), 5 * MB), 70 * MB)
    assert smaller.modules == PER_UNIT, "units that fit are closer to the batch wanted"


@pytest.mark.parametrize("loss", ["aan", "lls", "lls-mxm", "auglocal"])
def test_a_single_module_trains_by_the_networks_own_loss_whatever_was_named(loss):
    """Weights after three steps of SGD, against those of the loop that trains whole networks."""
    work = workload()
    whole, network = Chain.from_module(layers(), (3, 8, 8)), layers()
    layout = Blockwise(local_loss=loss)._layout(whole, work, ((0, 2, ""),))
    local, trainer = (
        LocalUnit(layout.modules[0].module, layout.make_loss(0), work),
        NetworkTrainer(network, network, work),
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        images = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 10, (4,), generator=generator)
        local.step(images.clone(), labels)
        trainer.step(images, labels)
    for found, expected in zip(whole.to_module().parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
