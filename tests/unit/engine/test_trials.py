"""Trials: short real runs that a plan is held against."""

import tempfile

import pytest
from torch import nn

import snugfit
from snugfit._engine import trials
from snugfit.errors import InfeasibleBudgetError, InterruptedRunError, UsageError

TINY = {"image_size": 8, "batch_size": 16, "epochs": 3, "max_train": 200, "threads": 1}


def small_net():
    """Weights of 2.3 MB, with their gradients and momentum more than a used heap may have to spare."""
    hidden = nn.Linear(4 * 36, 4000)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), hidden, nn.ReLU(), nn.Linear(4000, 10))


@pytest.fixture(scope="module")
def planned():
    return snugfit.plan(small_net, "digits", strategy="backprop", **TINY)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_trial_of_the_callers_own_module_leaves_it_whole(planned, folders):
    (trial,) = planned.compare(steps=2)
    assert (trial.strategy, trial.images, trial.epochs, trial.error) == ("backprop", 32, 1, None)
    assert trial.measured_peak_bytes > 0 and trial.measured_seconds > 0
    assert 0 < trial.predicted_seconds < planned.plan.choice.predicted.seconds
    assert not any(parameter.is_meta for parameter in planned.assembly.module.parameters())
    assert list(folders.iterdir()) == []


def test_a_named_model_runs_in_a_process_of_its_own(folders):
    plan = snugfit.plan("smallconv", "digits", strategy="backprop", **{**TINY, "image_size": 32})
    (trial,) = plan.compare(steps=1)
    assert trial.error is None and trial.measured_seconds > 0
    assert list(folders.iterdir()) == []


def test_every_strategy_that_fits_is_tried_though_each_was_measured_apart(folders):
    plan = snugfit.plan("smallconv", "digits", memory="60MB", **TINY)
    fitting = {each.strategy for each in plan.plan.candidates if each.feasible}
    trials = plan.compare(steps=1)
    assert plan.apart and len(fitting) > 2 and {each.strategy for each in trials} == fitting
    assert not any(each.error for each in trials) and list(folders.iterdir()) == []


def test_trials_next_to_the_process_that_plans_are_beyond_a_total():
    plan = snugfit.plan("smallconv", "digits", strategy="backprop", total_memory="2GB", **TINY)
    with pytest.raises(UsageError, match="beyond --total-memory"):
        plan.compare(steps=1)


def test_the_next_trial_follows_one_that_fails(planned, folders, monkeypatch):
    def fail(planned, folder):
        raise UsageError("no.")

    monkeypatch.setattr(trials, "_run_in_process", fail)
    (trial,) = planned.compare()
    assert (trial.error, trial.measured_seconds, trial.seconds_ratio) == ("no.", None, None)


def test_an_interruption_ends_them_all_and_leaves_nothing(planned, folders, monkeypatch):
    def stop(planned, folder):
        folder.mkdir()
        raise InterruptedRunError("stopped.")

    monkeypatch.setattr(trials, "_run_in_process", stop)
    with pytest.raises(InterruptedRunError):
        planned.compare()
    assert list(folders.iterdir()) == []


def test_trials_that_cannot_be(planned):
    with pytest.raises(UsageError, match="--compare-steps must be"):
        planned.compare(steps=-1)
    tight = snugfit.plan(small_net, "digits", memory="1kB", strategy="backprop", **TINY)
    with pytest.raises(InfeasibleBudgetError):
        tight.compare()


def test_the_error_of_a_process_is_its_last():
    assert trials._error_in("note  x\nerror: first\nerror: it broke\n") == "it broke"
    assert trials._error_in("note") is None
