"""Faults are drawn from seeds, and leave at least two agents but for the gateway's own."""

import pytest
from benchmarks.clusterfaults import good, render
from benchmarks.hostfaults import GATEWAY, SINGLE, draw, epochs


def test_a_seed_is_a_fault():
    trials = [draw(seed) for seed in range(300)]
    assert trials == [draw(seed) for seed in range(300)]
    for trial in trials:
        victims = [victim for _, victim in trial.faults]
        assert len(set(victims)) == len(victims) and max(victims) < trial.count
        assert victims == [0] or (0 not in victims and trial.count - len(victims) >= 2)
    assert {fault for trial in trials for fault, victim in trial.faults if victim} == set(SINGLE)
    assert {fault for trial in trials for fault, victim in trial.faults if not victim} == set(GATEWAY)
    assert {len(trial.faults) for trial in trials} == {1, 2} and {trial.count for trial in trials} == {3, 4}


@pytest.mark.parametrize(
    ("within", "left", "code", "passed"),
    [
        (True, [], 130, True),
        (False, [], 130, False),
        (True, ["python -m snugfit"], 130, False),
        (True, [], 0, False),  # it was interrupted, and says that it was done
        (True, [], 8, False),
        (True, [], -9, False),  # it did not end, and was killed
        (True, [], None, False),
    ],
)
def test_a_trial_passes_that_goes_on_in_time_ends_as_interrupted_and_leaves_nothing(within, left, code, passed):
    cell = {"within_limit": within, "leftovers": left, "launch_code": code, "went_on_seconds": 12.0, "faults": "cut",
            "load": 2.5}  # fmt: skip
    assert good(cell) is passed
    assert f"| cut | 1 | 1 | {int(passed)} | 12.0 | 12.0 | 2.5 |" in render([cell])


def test_two_at_once_are_one_row():
    cells = [
        {
            "within_limit": True,
            "leftovers": [],
            "launch_code": 130,
            "went_on_seconds": seconds,
            "faults": faults,
            "load": 1.0,
        }
        for seconds, faults in ((10.0, "cut, slow"), (None, "kill host, slow"), (4.0, "cut"))
    ]
    assert "| two hosts at once | 2 | 1 | 2 | 10.0 | 10.0 | 1.0 |" in render(cells) and "| all | 3 |" in render(cells)


def test_epochs_of_a_run(tmp_path):
    assert epochs(tmp_path) == -1
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("phase,epoch,step,loss\nnetwork,0,1,2.3\nnetwork,1,1,2.2\nnetw")
    assert epochs(tmp_path) == 1
