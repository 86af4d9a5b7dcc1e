"""Past runs correct predictions: seconds by the median of runs like it, peaks upwards alone."""

from dataclasses import replace

import pytest

from snugfit._core.plan import Correction, Cost, Phase
from snugfit._core.record import PhaseRecord, Record
from snugfit._core.workload import Workload
from snugfit._planner.calibration import MIN_OTHER_RUNS, SAME_NETWORK_RUNS, PastRun, corrected, correction, past_run

WORK = Workload("net", "digits", (1, 16, 16), 10, 100, 10, 10)
RUN = PastRun("backprop", "net", (1, 16, 16), 10.0, 20.0, 100, 90)


def test_nothing_is_learnt_from_nothing():
    assert correction([], "backprop", WORK) == Correction()


def test_one_run_of_this_network_is_enough():
    assert correction([RUN], "backprop", WORK) == Correction(seconds=2.0, peak=1.0, runs=1)


@pytest.mark.parametrize(
    "other",
    [
        {"strategy": "checkpoint"}, {"model": "another"}, {"input_shape": (3, 16, 16)}, {"seconds": 0.5},
        {"predicted_seconds": 0.0}, {"predicted_bytes": 0},
    ],
)  # fmt: skip
def test_one_run_of_anything_else_is_not(other):
    assert correction([replace(RUN, **other)], "backprop", WORK) == Correction()


def test_several_runs_of_other_networks_are():
    ratios = range(1, MIN_OTHER_RUNS + 1)
    runs = [replace(RUN, model=f"other {n}", predicted_seconds=20.0 / n, seconds=20.0) for n in ratios]
    assert correction(runs, "backprop", WORK).seconds == 2.0
    assert correction([*runs, replace(RUN, seconds=50.0)], "backprop", WORK).seconds == 5.0


def test_a_long_run_counts_more_than_several_short_ones():
    short = replace(RUN, predicted_seconds=1.0, seconds=4.0)
    long = replace(RUN, predicted_seconds=90.0, seconds=99.0)
    assert correction([short, short, short, long], "backprop", WORK).seconds == 1.1


def test_the_latest_runs_count():
    runs = [replace(RUN, seconds=100.0)] * 20 + [replace(RUN, seconds=30.0)] * SAME_NETWORK_RUNS
    assert correction(runs, "backprop", WORK) == Correction(3.0, 1.0, SAME_NETWORK_RUNS)


def test_a_peak_above_its_prediction_lifts_the_next_ones_and_none_below_lowers_them():
    assert correction([RUN, replace(RUN, peak_bytes=110)], "backprop", WORK).peak == pytest.approx(1.1 * 1.01)
    assert correction([replace(RUN, peak_bytes=50)], "backprop", WORK).peak == 1.0


@pytest.mark.parametrize(
    ("phases", "measured"),
    [((), 90), (((80, 70), (100, 90)), 90), (((50, 60), (100, 90)), 110), (((50, 51), (10, 40)), 130)],
)
def test_a_phase_above_its_own_prediction_counts_by_its_excess_although_the_run_held(phases, measured):
    """A test of the exit that took four times its few bytes is no reason to expect that of every phase."""
    made = tuple(PhaseRecord("p", (), 8, each, peak, 0, 1.0, 1.0, 3, 1) for each, peak in phases)
    record = Record(
        "backprop", "net", "digits", "cpu", {}, True, {"peak_bytes": 100}, {"peak_bytes": 90}, {}, {}, None, {}, "",
        phases=made,
    )  # fmt: skip
    run = past_run(record, WORK, Correction())
    assert (run.predicted_bytes, run.peak_bytes) == (100, measured)


def test_what_other_processes_added_to_a_run_does_not_count():
    phase = PhaseRecord("p", (), 8, 100, 90, 0, 1.0, 5.0, WORK.epochs, 1, delay_seconds=3.0)
    record = Record(
        "backprop", "net", "digits", "cpu", {}, True, {"peak_bytes": 100}, {"peak_bytes": 90}, {}, {}, None, {}, "",
        phases=(phase, phase),
    )  # fmt: skip
    assert past_run(record, WORK, Correction()).seconds == 4.0


def test_a_cost_is_corrected_in_all_its_parts():
    cost = Cost(100, 5.0, 50.0, 7, 9, (Phase("network", 100, 50.0, 8, ("a",), 7),))
    assert corrected(cost, Correction(2.0, 1.5, 1)) == Cost(
        150, 10.0, 100.0, 7, 9, (Phase("network", 150, 100.0, 8, ("a",), 7),)
    )
    assert corrected(cost, Correction()) == cost
