"""The choice of a local loss by memory, time and expected accuracy."""

from dataclasses import replace
from math import inf

import pytest
from strategy_samples import HARDWARE, MB, line, profile, workload
from torch import nn

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit.strategies.blockwise.config import Config
from snugfit.strategies.blockwise.loss_choice import EXPECTED_ACCURACY, LossChoice, profile_of
from snugfit.strategies.blockwise.strategy import Blockwise

COSTS = (("auglocal", (9, 30), 250), ("aan", (20, 10), 150), ("lls-mxm", (10, 10), 100))
NAMES = ("a", "b")


@pytest.mark.parametrize(
    ("aim", "exits", "found"),
    [
        ("accuracy", False, ["auglocal", "aan", "lls-mxm"]),
        ("time", False, ["aan", "lls-mxm"]),
        ("accuracy", True, ["aan", "lls-mxm"]),
        ("memory", False, ["lls-mxm"]),
    ],
)
def test_the_order_by_aim(aim, exits, found):
    assert LossChoice(COSTS, aim, exits).order() == found


def test_a_loss_that_is_neither_better_nor_leaner_is_not_considered():
    costs = (("auglocal", (9, 20), 100), ("aan", (20, 10), 100), ("lls-mxm", (19, 1), 100))
    assert LossChoice(costs, "time", exits=False).order() == ["auglocal", "lls-mxm"]


def test_reasons_name_each_better_loss():
    def reason(aim, chosen, exits=False):
        return LossChoice(COSTS, aim, exits).reason(chosen, "does not fit")

    assert reason("accuracy", "auglocal") == "Its local loss is auglocal, of which the most accuracy is expected."
    assert reason("memory", "lls-mxm") == "Its local loss is lls-mxm, which needs the least memory."
    assert reason("time", "lls-mxm") == (
        "Its local loss is lls-mxm. More accuracy is expected of others, but auglocal takes 2.5 times the arithmetic "
        "of the cheapest, where --aim time accepts 2 times, and aan does not fit."
    )
    assert "auglocal makes exits large." in reason("accuracy", "aan", exits=True)


def test_the_explanation_has_the_reason_where_no_loss_was_named():
    settings = {"modules": ((0, 0, ""), (1, 1, "")), "local_loss": "aan", "loss_aim": "accuracy", "module_units": "1"}
    assert len(list(Config().explanation(settings, NAMES))) == 1
    *_, sentence = Config().explanation({**settings, "loss_costs": COSTS}, NAMES)
    assert sentence.endswith("but auglocal does not fit at a batch of 16.")
    few = {**settings, "loss_costs": COSTS, "module_units": "auto"}
    assert list(Config().explanation(few, NAMES))[-1].endswith("but auglocal does not fit in as few modules.")


def strategy(**changes):
    made = tuple((name, tuple(size * MB for size in sizes), macs) for name, sizes, macs in COSTS)
    return Blockwise(local_loss="auto", loss_costs=made, **{"loss_aim": "accuracy", **changes})


def measured(**sample_bytes):
    """A profile of two units: bytes per sample by local loss, which every unit with it takes."""
    names = {
        f"unit:{unit} with {loss.replace('_', '-')}": size for loss, size in sample_bytes.items() for unit in NAMES
    }
    lines = {name: line(0, size, name=name) for name, size in names.items()}
    return profile(lines, kept=dict.fromkeys(lines, 0), units=(*NAMES, "head"))


def chosen(made, budget=100, **changes):
    found = next(strategy(**changes).propose(workload(), made, HARDWARE, Budget(budget * MB)), None)
    return found and found.local_loss


def test_the_best_loss_that_fits_at_the_batch_wanted_is_proposed():
    every = {"auglocal": MB, "aan": MB, "lls_mxm": MB}
    assert chosen(measured(**every)) == "auglocal"
    assert chosen(measured(**every), loss_aim="time") == "aan"
    assert chosen(measured(**every | {"auglocal": 10 * MB})) == "aan"
    assert chosen(measured(**every | {"auglocal": 10 * MB, "aan": 10 * MB})) == "lls-mxm"


def test_if_none_fits_at_the_batch_wanted_the_leanest_comes_first():
    made = measured(auglocal=30 * MB, aan=20 * MB, lls_mxm=10 * MB)
    assert chosen(made) == "lls-mxm"
    assert chosen(made, budget=9) is None


def test_a_proposal_is_estimated_by_the_lines_of_its_loss():
    made = measured(auglocal=MB, aan=2 * MB)
    (found, *_) = strategy().propose(workload(), made, HARDWARE, Budget())
    named = replace(found, local_loss="aan", loss_costs=())
    alone = profile_of(made, "aan")
    assert set(alone.lines) == {"unit:a", "unit:b"} and alone.lines["unit:a"].sample_bytes == 2 * MB
    peaks = [each.estimate(workload(), made, HARDWARE).peak_bytes for each in (found, named)]
    assert peaks[0] < peaks[1] == named.estimate(workload(), alone, HARDWARE).peak_bytes


def test_an_infeasible_answer_names_the_leanest_and_what_was_considered():
    lack = strategy().shortfall(workload(), measured(auglocal=MB, aan=MB, lls_mxm=MB), HARDWARE, Budget(MB))
    assert lack.reasons[0].endswith("for one sample with lls-mxm, the leanest of auglocal, aan, lls-mxm")


def chain():
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 9, 10),
    )  # fmt: skip
    return Chain.from_module(network.to("meta"), (3, 8, 8))


def wanted(probes, tried, available=inf):
    return {probe.name for probe in probes if probe.needed(tried, available)}


@pytest.mark.parametrize("module_units", ["1", "auto"])
def test_only_the_best_loss_is_measured_until_it_does_not_fit(module_units):
    made = Blockwise(local_loss="auto", loss_aim="accuracy", module_units=module_units).prepared(workload(), chain())
    assert [name for name, *_ in made.loss_costs] == list(EXPECTED_ACCURACY)
    assert made.prepared(workload(), chain()).loss_costs == made.loss_costs
    probes = made.probes(workload(), chain(), HARDWARE)
    count = 3 if module_units == "1" else 1
    first = wanted(probes, {})
    assert len(first) == count and all(name.endswith(" with auglocal") for name in first)
    assert not wanted(probes, dict.fromkeys(first, line(1, 1)))
    largest, second = max(first), wanted(probes, dict.fromkeys(first))
    assert largest not in second and all(name.endswith(" with auglocal") for name in second) is (module_units == "auto")


def test_a_budget_below_every_loss_measures_the_leanest_alone():
    made = Blockwise(local_loss="auto").prepared(workload(), chain())
    probes = made.probes(workload(), chain(), HARDWARE)
    leanest = min(made.loss_costs, key=lambda cost: max(cost[1]))[0]
    assert {name.partition(" with ")[2] for name in wanted(probes, {}, 1.0)} == {leanest}


def test_a_named_loss_is_measured_under_plain_names():
    made = Blockwise(local_loss="aan")
    assert made.prepared(workload(), chain()) is made
    assert all(" with " not in probe.name for probe in made.probes(workload(), chain(), HARDWARE))
