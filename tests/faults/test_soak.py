"""A few trials of benchmarks/soak.py, which runs for an hour by hand; and that it notices what it looks for."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import soak
from benchmarks.soak_faults import FAULTS, Reference, Trial
from benchmarks.soak_runs import MARK, Place, leftovers, names_in, orphans, weights_of

SMALL = {"data": "digits", "max_train": 128, "max_val": 40, "epochs": 2}
TRIALS = [
    ("backprop", "interrupted", 10),
    pytest.param("blockwise", "killed", 4, marks=pytest.mark.slow),
    pytest.param("lls-mxm", "small files", 0, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> soak.Soak:
    return soak.Soak(Place(tmp_path_factory.mktemp("soak"), timeout=200), SMALL, seed=16)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("recipe", "fault", "number"), TRIALS)
def test_a_disturbed_run_ends_like_an_undisturbed_one(trials: soak.Soak, recipe: str, fault: str, number: int) -> None:
    found = trials.trial(recipe, fault, number)
    assert found["failures"] == [], found["did"]
    assert found["codes"]


def test_a_trial_is_drawn_from_its_seed_and_number(tmp_path: Path) -> None:
    draws = [soak.Soak(Place(tmp_path), {}, seed) for seed in (1, 1, 2)]
    drawn = [each.drawn(n, soak.RECIPES, FAULTS) for each in draws for n in range(9)]
    assert drawn[:9] == drawn[9:18] != drawn[18:]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """A trial over a finished run of made-up files."""
    run = tmp_path / "run"
    (run / "checkpoint" / "000003").mkdir(parents=True)
    for name in ("model.safetensors", "record.json", "checkpoint/000003/model.safetensors"):
        (run / name).write_bytes(b"weights")
    (tmp_path / "tmp").mkdir()
    reference = Reference({}, run, weights_of(run), names_in(run), 1.0, 1)
    return Trial(Place(tmp_path), reference, run, random.Random(0))


def test_other_weights_are_noticed(trial: Trial) -> None:
    trial.finish()
    assert trial.finished and trial.failures == []
    (trial.run / "model.safetensors").write_bytes(b"Weights")
    trial.finish()
    assert trial.failures == ["the weights differ from those of the uninterrupted run"]


@pytest.mark.parametrize(("refused", "batch", "failures"), [(True, 8, 0), (True, 16, 1), (False, 8, 1)])
def test_a_smaller_batch_excuses_other_weights_where_memory_was_refused(
    trial: Trial, tmp_path: Path, refused: bool, batch: int, failures: int
) -> None:
    trial.run = tmp_path / "other"
    for folder, size in ((trial.reference.run, 16), (trial.run, batch)):
        folder.mkdir(exist_ok=True)
        (folder / "record.json").write_text(json.dumps({"phases": [{"batch_size": size}]}))
        (folder / "model.safetensors").write_bytes(b"weights at %d, %s" % (size, folder.name.encode()))
    trial.refused = refused
    trial.finish()
    assert len(trial.failures) == failures, trial.failures
    assert bool(trial.did) is not bool(failures)


def test_files_too_many_and_too_few_are_noticed(trial: Trial) -> None:
    expected = trial.reference.names
    assert leftovers(trial.place, trial.run, expected) == []
    (trial.run / "checkpoint" / "000003").rename(trial.run / "checkpoint" / "000012")
    assert leftovers(trial.place, trial.run, expected) == []
    (trial.run / "record.json").rename(trial.run / "record.json.tmp")
    (trial.place.temporary / "scratch").write_text("")
    assert len(leftovers(trial.place, trial.run, expected)) == 4


def test_processes_that_live_on_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.soak_runs._GRACE_SECONDS", 0.2)
    place = Place(tmp_path)
    assert orphans(place) == []
    words = [sys.executable, "-S", "-c", "print(1, flush=True); import time; time.sleep(60)"]
    left = subprocess.Popen(words, env={**os.environ, MARK: str(tmp_path)}, stdout=subprocess.PIPE)
    assert left.stdout is not None and left.stdout.readline() == b"1\n"
    assert orphans(place) == [left.pid]
    left.kill()
    left.wait()
    left.stdout.close()


def test_wrong_exit_codes_and_tracebacks_are_noticed(trial: Trial) -> None:
    class Ended:
        said = "Traceback (most recent call last):\n  here\nKeyError: 'a'"

        def ends(self) -> int:
            return 1

    assert trial.end(Ended(), {0, 6}) == 1  # type: ignore[arg-type]
    assert [failure.partition(":")[0] for failure in trial.failures] == [
        "exit code 1, not one of [0, 6]", "a traceback was shown",
    ]  # fmt: skip


def test_the_table_counts_trials_and_lists_failures() -> None:
    cells = [
        {"recipe": "backprop", "fault": "killed", "command": f"n{i}", "did": ["SIGKILL"], "failures": bad}
        for i, bad in enumerate(([], ["the weights differ"], []))
    ]
    text = soak.render(json.loads(json.dumps(cells)))
    assert "| killed | 3, 1 failed | 3, 1 failed |" in text
    assert "- n1 (SIGKILL): the weights differ" in text
    assert "No failures." in soak.render(cells[:1])
