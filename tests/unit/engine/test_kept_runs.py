"""Runs whose heap keeps freed memory stay within their predictions, and these within the budget."""

import sys

import pytest


def run_in(memory):
    """Peaks in bytes of a run in a budget: what it may keep, what was measured, predicted and allowed."""
    import snugfit

    planned = snugfit.plan(
        *("resnet20", "digits", snugfit.Budget(memory=memory)), strategy="backprop", image_size=32, max_train=480,
        max_val=40, batch_size=32, epochs=2, threads=1, profile_cache="off",
    )  # fmt: skip
    (phase,) = planned.plan.choice.predicted.phases
    record = planned.run(())
    measured, predicted = record.measured["peak_bytes"], record.predicted["peak_bytes"]
    return [phase.kept_bytes, measured, predicted, record.budget["memory_bytes"]]


def run_in_budgets():
    import snugfit

    snugfit.prepare_process(1)
    free = run_in(None)
    least = free[2] - free[0]
    return [free, run_in(int(least * 1.75)), run_in(int(least * 1.2))]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the thresholds are glibc's")
def test_measured_is_at_most_predicted_which_is_at_most_the_budget(fresh_process, tmp_path):
    found = fresh_process(run_in_budgets, helpers=(run_in,), folder=tmp_path)["run_in_budgets"]
    for _, measured, predicted, budget in found:
        assert 0 < measured <= predicted <= (budget or predicted), found
    without, ample, scarce = found
    assert without[0] > 0 < ample[0] and scarce[0] == 0
    assert max(without[1], ample[1]) > 1.05 * scarce[1], "they take more than without keeping: 64 to 76 MB, and 63"
