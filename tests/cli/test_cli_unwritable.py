"""`report` and `cluster doctor` onto places that cannot be written: one line, code 2, and before any work."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import command_line
import fake_runs
import pytest

from snugfit._api import trained_models
from snugfit._cli.examine import MARK
from snugfit._engine import figure_data
from snugfit.errors import UsageError

DROP, OVERRIDE = 24, 1
"""``prctl`` that takes a capability from what is started next, and that of root to write where nobody may."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A finished run."""
    folder = fake_runs.write_run(tmp_path / "a", fake_runs.blockwise(tmp_path / "a"), None)
    yield folder
    folder.chmod(0o755)


def unprivileged(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as somebody who may not write everywhere."""
    libc = ctypes.CDLL(None)
    return command_line.run(*words, cwd=folder, preexec_fn=lambda: libc.prctl(DROP, OVERRIDE, 0, 0, 0))


@pytest.mark.parametrize("used_before", [False, True])
def test_a_report_onto_a_folder_that_may_not_be_written(run, used_before):
    if used_before:
        (run / "lock").touch()
        (run / "report.html").write_text("the page before")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    run.chmod(0o555)
    done = unprivileged(run.parent, "report", "a")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: cannot write a/report.html: Permission denied. Make the run folder writable.\n"
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "words"),
    [("report.html", "cannot write a/report.html: Is a directory"), ("lock", "cannot lock the run folder with a/lock")],
)
def test_a_report_onto_a_folder_with_other_things_in_its_place(run, name, words, snugfit):
    (run / name).mkdir()
    outcome = snugfit("report", "a")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {words}") and len(outcome.err.splitlines()) == 1
    assert {path.name for path in run.iterdir()} == {"record.json", "manifest.json", name}


def test_a_report_of_a_folder_that_is_missing(snugfit):
    outcome = snugfit("report", "nowhere")
    assert outcome.code == 4 and "nowhere is not a run folder" in outcome.err and not Path("nowhere").exists()


def test_places_of_pictures_are_looked_at_before_they_are_made(run, monkeypatch):
    monkeypatch.setattr(figure_data, "make_pictures", lambda *_: pytest.fail("work began"))
    (run / "report.html").mkdir()
    with pytest.raises(UsageError, match=r"cannot write .*report\.html: Is a directory"):
        trained_models.draw_report(run, pictures=True)


@pytest.mark.parametrize("out", ["/proc/x", "dangling/x", "file/x", "missing/x.json", "a", "."])
def test_doctor_looks_at_its_place_before_it_measures(out, run, snugfit, monkeypatch):
    monkeypatch.setattr("snugfit._cli.doctor.run_all", lambda *_: pytest.fail("work began"))
    Path("file").touch()
    Path("dangling").symlink_to("missing/place")
    before = sorted(run.parent.rglob("*"))
    outcome = snugfit("cluster", "doctor", "--processes", "1", "--out", out, "--json")
    assert outcome.code == outcome.json["error"]["code"] == 2
    assert outcome.err.startswith(f"error: cannot write {out}: ") and outcome.err.endswith("Choose another --out.\n")
    assert len(outcome.err.splitlines()) == 1 and sorted(run.parent.rglob("*")) == before


def test_doctor_onto_a_folder_that_may_not_be_written(run):
    run.chmod(0o555)
    done = unprivileged(run.parent, "cluster", "doctor", "--processes", "1", "--out", "a/cluster.json")
    assert done.returncode == 2
    assert done.stderr == "error: cannot write a/cluster.json: Permission denied. Choose another --out.\n"


def test_what_doctor_found_is_shown_where_its_place_is_full(run, snugfit, monkeypatch):
    told = {
        "ranks": [{"rank": 0, "host": "a", "threads": 1, "macs_per_second": 1e9, "free_bytes": 1, "versions": {}}],
        "links": [],
    }

    def measured(commands, terms, on_line):
        on_line(MARK + json.dumps(told))
        return 0

    monkeypatch.setattr("snugfit._cli.doctor.run_all", measured)
    outcome = snugfit("cluster", "doctor", "--processes", "1", "--out", "/dev/full")
    assert outcome.code == 6 and "Processes" in outcome.err
    assert outcome.err.endswith("error: no space left to write /dev/full; free some. Choose another --out.\n")
    assert snugfit("cluster", "doctor", "--processes", "1", "--out", "cluster.json").code == 0
    assert Path("cluster.json").read_text().startswith("{") and [*Path().glob("*.part")] == []
