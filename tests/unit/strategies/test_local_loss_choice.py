"""The choice of a local loss by memory, time and expected accuracy."""

from dataclasses import replace
from math import inf

import pytest
from strategy_samples import HARDWARE, MB, line, profile, workload
from torch import nn

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit.strategies.blockwise.config import Config
from snugfit.strategies.blockwise.loss_choice import EXPECTED_ACCURACY, LossChoice, local_losses, profile_of
from snugfit.strategies.blockwise.strategy import Blockwise

BEST = "auglocal:depth=2"
COSTS = ((BEST, (9, 30), 250), ("aan", (20, 10), 150), ("lls-mxm", (10, 10), 100))
NAMES = ("a", "b")


@pytest.mark.parametrize(
    ("aim", "exits", "found"),
    [
        ("accuracy", False, [BEST, "aan", "lls-mxm"]),
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

    assert reason("accuracy", BEST) == "Its local loss is auglocal:depth=2, of which the most accuracy is expected."
    assert reason("memory", "lls-mxm") == "Its local loss is lls-mxm, which needs the least memory."
    assert reason("time", "lls-mxm") == (
        "Its local loss is lls-mxm. More accuracy is expected of others, but auglocal:depth=2 takes 2.5 times the "
        "arithmetic of the cheapest, where --aim time accepts 2 times, and aan does not fit."
    )
    assert "auglocal:depth=2 makes exits large." in reason("accuracy", "aan", exits=True)


def test_the_explanation_has_the_reason_where_no_loss_was_named():
    settings = {"modules": ((0, 0, ""), (1, 1, "")), "local_loss": "aan", "loss_aim": "accuracy", "module_units": "1"}
    assert len(list(Config().explanation(settings, NAMES))) == 1
    *_, sentence = Config().explanation({**settings, "loss_costs": COSTS}, NAMES)
    assert sentence.endswith("but auglocal:depth=2 does not fit, or only at a batch below 16.")
    few = {**settings, "loss_costs": COSTS, "module_units": "auto"}
    assert list(Config().explanation(few, NAMES))[-1].endswith(
        "but auglocal:depth=2 does not fit in as few modules, or only at a batch below 16."
    )


def strategy(**changes):
    made = tuple((name, tuple(size * MB for size in sizes), macs) for name, sizes, macs in COSTS)
    return Blockwise(local_loss="auto", loss_costs=made, **{"loss_aim": "accuracy", **changes})


def measured(**sample_bytes):
    """A profile of two units: bytes per sample by local loss, which every unit with it takes."""
    losses = {"auglocal": BEST, "lls_mxm": "lls-mxm"}
    names = {
        f"unit:{unit} with {losses.get(loss, loss)}": size for loss, size in sample_bytes.items() for unit in NAMES
    }
    lines = {name: line(0, size, name=name) for name, size in names.items()}
    return profile(lines, kept=dict.fromkeys(lines, 0), units=(*NAMES, "head"))


def chosen(made, budget=100, **changes):
    found = next(strategy(**changes).propose(workload(), made, HARDWARE, Budget(budget * MB)), None)
    return found and found.local_loss


def test_the_best_loss_that_fits_at_the_batch_wanted_is_proposed():
    every = {"auglocal": MB, "aan": MB, "lls_mxm": MB}
    assert chosen(measured(**every)) == BEST
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
    assert lack.reasons[0].endswith("for one sample with lls-mxm, the leanest of auglocal:depth=2, aan, lls-mxm")


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
    assert len(first) == count and all(name.endswith(f" with {BEST}") for name in first)
    assert not wanted(probes, dict.fromkeys(first, line(1, 1)))
    largest, second = max(first), wanted(probes, dict.fromkeys(first))
    assert largest not in second and all(name.endswith(f" with {BEST}") for name in second) is (module_units == "auto")


def test_a_budget_below_every_loss_measures_the_leanest_alone():
    made = Blockwise(local_loss="auto").prepared(workload(), chain())
    probes = made.probes(workload(), chain(), HARDWARE)
    leanest = min(made.loss_costs, key=lambda cost: max(cost[1]))[0]
    assert {name.partition(" with ")[2] for name in wanted(probes, {}, 1.0)} == {leanest}


def test_a_named_loss_is_measured_under_plain_names():
    made = Blockwise(local_loss="aan")
    assert replace(made.prepared(workload(), chain()), exit_costs=()) == made
    assert all(" with " not in probe.name for probe in made.probes(workload(), chain(), HARDWARE))


DEPTHS = tuple(f"auglocal:depth={depth}" for depth in (4, 3, 2, 1))
DEEPER = tuple((name, (10 - rank, 10 - rank), 100) for rank, name in enumerate(DEPTHS))


def test_an_open_depth_is_a_choice_among_depths():
    assert local_losses("auglocal") == DEPTHS
    assert local_losses("auglocal:depth=9") == ("auglocal:depth=9",) and local_losses("aan") == ("aan",)
    assert LossChoice(DEEPER, "time", exits=True).order() == list(DEPTHS)
    assert LossChoice(DEEPER, "memory", exits=False).order() == ["auglocal:depth=1"]
    sentence = LossChoice(DEEPER, "time", exits=False).reason("auglocal:depth=3", "does not fit")
    assert sentence.endswith(
        "is auglocal:depth=3. More accuracy is expected of others, but auglocal:depth=4 does not fit."
    )


def test_a_larger_budget_never_has_a_smaller_depth():
    """By module count first: modules of all units use none."""
    lines = {
        f"unit:{unit} with {name}": line(0, size * MB, name=unit)
        for name, size in zip(DEPTHS, (8, 6, 4, 2), strict=True) for unit in NAMES
    }  # fmt: skip
    made = profile(lines, kept=dict.fromkeys(lines, 0), units=(*NAMES, "head"))
    open_depth = Blockwise(local_loss="auglocal", loss_costs=DEEPER, module_units="1")
    depths = []
    for budget in range(30, 200, 5):
        (found, *_) = open_depth.propose(workload(), made, HARDWARE, Budget(budget * MB))
        depths.append(int(found.local_loss[-1]))
    assert depths == sorted(depths) and set(depths) == {1, 2, 3, 4}


@pytest.mark.parametrize("module_units", ["1", "auto"])
def test_depths_are_priced_and_measured_like_other_losses(module_units):
    made = Blockwise(local_loss="auglocal", loss_aim="accuracy", module_units=module_units)
    made = made.prepared(workload(), deep_chain())
    assert [name for name, *_ in made.loss_costs] == list(DEPTHS)
    work = [macs for *_, macs in made.loss_costs]
    assert work == sorted(work, reverse=True) and work[0] > work[-1], "deeper auxiliary networks take more arithmetic"
    first = wanted(made.probes(workload(), deep_chain(), HARDWARE), {})
    assert first and all(name.endswith(made._losses()[0]) for name in first)


def deep_chain():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return Chain.from_module(nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10)).to("meta"), (3, 8, 8))
