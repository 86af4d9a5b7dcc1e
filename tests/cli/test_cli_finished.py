"""Interrupted once training is done: the run is finished, and only its report is missing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import fake_runs
import pytest

from snugfit._core.record import Record

SAID = (
    "error: interrupted; the run in {0} is finished, and only its report is missing.\n`snugfit report {0}` draws it.\n"
)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run folder without its report."""
    run = tmp_path / "a"
    return fake_runs.write_run(run, fake_runs.blockwise(Path("elsewhere")), None)


def test_an_interruption_while_the_page_is_drawn(snugfit, monkeypatch):
    def interrupt(run_dir: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("snugfit._report.page.write_report", interrupt)
    outcome = snugfit("train", "--out", "here", "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", SAID.format("here"))


def test_an_interruption_between_the_record_and_the_page(snugfit):
    """The process that trains is killed by SIGTERM once it has written the record."""
    outcome = snugfit("train", "--model", "recorded", "--out", "here", "--quiet", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (130, 130)
    assert outcome.err == SAID.format("here")


def test_resuming_it_draws_the_page_and_trains_nothing(snugfit, finished, monkeypatch):
    monkeypatch.setattr("snugfit._cli.train.run_job", lambda job: pytest.fail("trained again"))
    outcome = snugfit("train", "--resume", "a")
    assert (outcome.code, outcome.out) == (0, "a\n") and "only its report was missing" in outcome.err
    assert (finished / "report.html").is_file()
    (finished / "report.html").unlink()
    assert Record.from_json(snugfit("train", "--resume", "a", "--json").json).run_dir == "a"


def test_a_run_that_has_its_page_or_exceeded_its_budget_is_left_to_the_process_that_trains(snugfit, finished):
    (finished / "report.html").touch()
    assert snugfit("train", "--resume", "a", "--json").json["settings"] == {"resumed": True, "threads": [None]}
    (finished / "report.html").unlink()
    record = fake_runs.blockwise(finished)
    over = dataclasses.replace(record, measured=record.measured | {"peak_bytes": record.budget["memory_bytes"] + 1})
    fake_runs.write_run(finished, over, None)
    assert snugfit("train", "--resume", "a", "--json").json["settings"]["resumed"]


def test_a_damaged_record_is_said(snugfit, finished):
    data = json.loads((finished / "record.json").read_text())
    (finished / "record.json").write_text(json.dumps(data | {"budget": {"memory_bytes": 10**12}}))
    outcome = snugfit("train", "--resume", "a")
    assert outcome.code == 4 and "record.json" in outcome.err
