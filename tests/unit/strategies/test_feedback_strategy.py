"""What the ``feedback`` strategy refuses, what its step holds, and that each rule learns."""

import pytest
from strategy_samples import HARDWARE, workload
from torch import nn

import snugfit
from snugfit._chain import Chain
from snugfit._training.events import EpochDone
from snugfit.errors import InfeasibleBudgetError
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.feedback.strategy import Feedback

RULES = ("dfa", "drtp", "pepita")


def chain_of(*layers):
    return Chain.from_module(nn.Sequential(*layers).to("meta"), (3, 8, 8))


def deep(depth=6):
    convs = [layer for _ in range(depth) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    return chain_of(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *convs, nn.Flatten(), nn.Linear(512, 10))


def refusals(chain, rule="pepita", **changes):
    return Feedback(feedback_rule=rule).validate(workload(**changes), chain, HARDWARE)


@pytest.mark.parametrize("rule", RULES)
def test_common_networks_are_served(rule):
    assert refusals(deep(), rule) == []


def test_pepita_tells_every_unit_that_it_cannot_train():
    strange = chain_of(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 3),
        nn.PReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    found = refusals(strange)
    assert [reason.partition(" (")[0] for reason in found] == ["pepita: unit 0", "pepita: unit 3"]
    assert "Conv2d, ReLU, BatchNorm2d" in found[0] and "is not one layer with at most a norm" in found[0]
    assert refusals(strange, "dfa") == refusals(strange, "drtp") == []


@pytest.mark.parametrize("end", [[nn.ReLU()], [nn.Dropout(0.1)], [nn.BatchNorm1d(10)]])
def test_pepita_needs_a_network_that_ends_in_its_output_layer(end):
    ended = chain_of(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10), *end)
    (reason,) = refusals(ended)
    assert "must end in the weights of unit 3" in reason
    assert refusals(ended, "dfa") == []


def test_pepita_is_not_for_half_precision():
    (reason,) = refusals(deep(), precision="bfloat16")
    assert "bfloat16" in reason
    assert refusals(deep(), "dfa", precision="bfloat16") == refusals(deep(), "drtp", precision="bfloat16") == []


@pytest.mark.parametrize("rule", RULES)
def test_label_smoothing_is_refused(rule):
    (reason,) = refusals(deep(), rule, label_smoothing=0.1)
    assert "leave out --label-smoothing" in reason


def test_a_plan_says_why_there_is_none(tmp_path):
    """From the option to the error."""

    def strange():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.PReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))

    plan = snugfit.plan(strange, "digits", strategy="feedback", feedback_rule="pepita", image_size=8, max_train=64)
    assert not plan.plan.candidates[0].feasible
    with pytest.raises(InfeasibleBudgetError, match=r"pepita: unit 0 \(Conv2d, PReLU\)"):
        plan.run((), out=tmp_path / "run")


def floor(rule, batch=16, chain=None):
    plain, _ = Feedback(feedback_rule=rule).probes(workload(), chain or deep(), HARDWARE)
    return plain.floor(batch)


def test_drtp_keeps_the_maps_of_one_unit_and_dfa_those_of_all():
    """Each further unit adds a map to DFA's step, and to DRTP's what it owns: matrix, weights and their momentum."""
    map_bytes, owned = 16 * 512 * 4, 10 * 512 * 4 + 2 * 4 * (8 * 8 * 9 + 8)
    grown = {rule: floor(rule, chain=deep(9)) - floor(rule, chain=deep(6)) for rule in ("dfa", "drtp")}
    assert grown["drtp"] == 3 * owned
    assert grown["dfa"] == 3 * (owned + map_bytes)


@pytest.mark.parametrize("rule", RULES)
def test_floors_are_those_of_whole_steps(rule):
    probes = Feedback(feedback_rule=rule).probes(workload(), deep(), HARDWARE)
    assert [probe.name for probe in probes] == ["feedback", "feedback:accumulate"]
    for probe in probes:
        step = probe.build()
        step(4)
        assert 0.5 * probe.floor(16) < tensor_peak_bytes(lambda step=step: step(16)) <= probe.floor(16)


def small_net():
    norms = [
        (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in ((1, 16), (16, 32))
    ]
    return nn.Sequential(*(layer for block in norms for layer in block), nn.Flatten(), nn.Linear(32 * 4, 10))


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_learns_digits(rule, tmp_path):
    """Three passes over 1,000 images of ten classes; chance is a tenth."""
    losses = []
    plan = snugfit.plan(
        small_net, "digits", strategy="feedback", feedback_rule=rule, epochs=3, max_train=1000, max_val=100, lr=0.01,
        batch_size=32, image_size=8, seed=1, augment=False,
    )  # fmt: skip
    record = plan.run(
        (lambda event: losses.append(event.loss) if isinstance(event, EpochDone) else None,), tmp_path / "r"
    )
    assert record.strategy == "feedback" and record.settings["feedback_rule"] == rule
    assert losses[2] < losses[1] < losses[0] and losses[2] < 0.5 * losses[0]
    assert record.accuracy["test"] > 0.7
