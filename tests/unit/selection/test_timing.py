"""The time model between the two steps that were measured."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from profiles import branched, layers, straight, with_steps

from snugfit.selection.network import Network
from snugfit.selection.timing import StepTimes

MADE = [(10, [(1, 0.5)]), (20, [(2, 0.5), (1, 0.25)]), (5, []), (30, [(4, 1), (1, 0.5)])]


def times(made, stock=500.0, full=400.0, head=100.0, batch=1, measured_at=1):
    return StepTimes(Network(with_steps(straight(*made), stock, full, head, measured_at), batch))


def test_both_anchors_are_as_measured():
    found = times(MADE)
    assert found.full == 500
    assert found.least == 100
    assert found.step_seconds(found.network.head) == 100
    assert found.step_seconds(found.everything) == pytest.approx(400, rel=1e-12)
    assert found.ratio(found.everything) == pytest.approx(0.8, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(branched())
def test_selections_lie_between_them(profile):
    found = StepTimes(Network(with_steps(profile, 500, 400, 100), 1))
    network = found.network
    rng = np.random.default_rng(0)
    for _ in range(5):
        mask = (rng.random(len(network.names)) < 0.4) | network.head
        assert found.step_seconds(mask) >= 100 - 1e-9
        if network.backward_seconds(found.everything) > network.backward_seconds(network.head):
            assert found.step_seconds(mask) <= 400 * (1 + 1e-12)


def test_a_step_grows_with_the_batch_and_its_updates_do_not():
    found = times(MADE, batch=6, measured_at=2)
    updates, head = 0.5 + 0.5 + 0.25 + 1 + 0.5, 1 + 0.5
    assert found.full == pytest.approx((500 - updates) * 3 + updates)
    assert found.least == pytest.approx((100 - head) * 3 + head)
    assert found.step_seconds(found.everything) == pytest.approx((400 - updates) * 3 + updates)


def test_updates_that_take_longer_alone_than_the_whole_step_do_not_make_it_negative():
    found = times([(1, [(1, 50)]), (1, [(1, 50)])], stock=40, full=40, head=20, batch=4)
    assert found.full == 40
    assert found.least == 20


def test_without_measured_steps_the_sums_stand_for_them():
    found = StepTimes(Network(straight(*MADE), 1))
    assert found.least == 4 + 4 + 1 + 1 + 0.5
    assert found.full == found.step_seconds(found.everything) == 4 + (20 + 5 + 30) + 9 + 2.75


def test_steps_that_contradict_the_model_leave_it_unscaled():
    found = times(MADE, stock=500, full=90, head=100)
    mask = found.network.mask(["1.1"]) | found.network.head
    assert found.step_seconds(mask) == 100 + 1.25 + 35


@settings(max_examples=100, deadline=None)
@given(layers(least=2))
def test_the_budget_of_the_chain_is_the_ratios(made):
    """A selection that takes the whole budget has that ratio, by the chain's own sum."""
    found = times(made)
    network = found.network
    others = np.flatnonzero(~network.head)
    for k in others:
        mask = network.head.copy()
        mask[k] = True
        chain = network.t_dw[k] + network.t_dy[k + 1 : others[-1] + 1].sum()
        left = found.backward_budget(found.ratio(mask))
        assert left == pytest.approx(chain * (1 + 1e-9), rel=1e-12, abs=1e-9), "with room for rounding"


@settings(max_examples=100, deadline=None)
@given(layers(least=2))
def test_the_smallest_ratio_is_that_of_the_cheapest_tensor(made):
    found = times(made)
    network = found.network
    alone = [
        found.ratio(network.mask([name]) | network.head)
        for name, of_head in zip(network.names, network.head, strict=True)
        if not of_head
    ]
    assert found.smallest_ratio == pytest.approx(min(alone, default=math.inf), rel=1e-12)


def test_a_classifier_alone_has_no_ratio():
    assert times([(1, [(1, 1), (1, 1)])]).smallest_ratio == math.inf
