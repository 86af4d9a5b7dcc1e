"""Runs whose heap keeps freed memory stay within their predictions, and these within the budget."""

import sys

import pytest


def planned_in(memory):
    import snugfit

    return snugfit.plan(
        *("resnet20", "digits", snugfit.Budget(memory=memory)), strategy="backprop", image_size=32, max_train=480,
        max_val=40, batch_size=32, epochs=2, threads=1, profile_cache="off",
    )  # fmt: skip


def run_with(share):
    """Peaks in bytes of a run in this multiple of what it needs: what it may keep, measured, predicted and allowed."""
    import snugfit

    snugfit.prepare_process(1)
    planned = planned_in(None)
    (phase,) = planned.plan.choice.predicted.phases
    if share is not None:
        planned = planned_in(int((phase.peak_bytes - phase.kept_bytes) * share))
        (phase,) = planned.plan.choice.predicted.phases
    record = planned.run(())
    measured, predicted = record.measured["peak_bytes"], record.predicted["peak_bytes"]
    return [phase.kept_bytes, measured, predicted, record.budget["memory_bytes"]]


def without_budget():
    return run_with(None)


def ample_budget():
    return run_with(1.75)


def scarce_budget():
    return run_with(1.2)


@pytest.mark.skipif(sys.platform != "linux", reason="the thresholds are glibc's")
def test_measured_is_at_most_predicted_which_is_at_most_the_budget(fresh_process, tmp_path):
    helpers, found = (planned_in, run_with), []
    for each in (without_budget, ample_budget, scarce_budget):
        found.append(fresh_process(each, helpers=helpers, folder=tmp_path)[each.__name__])
    for _, measured, predicted, budget in found:
        assert 0 < measured <= predicted <= (budget or predicted), found
    without, ample, scarce = found
    assert without[0] > 0 < ample[0] and scarce[0] == 0
    assert without[1] > without[2] - without[0], "it takes more than it needs without keeping"
