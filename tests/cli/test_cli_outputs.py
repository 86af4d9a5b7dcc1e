"""What ``--out`` and its like name is looked at before any work, and devices and links stay what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from snugfit._cli import child_process
from snugfit._cli.child_process import memory_kills

WRONG = ["/proc/x", "dangling", "file/x"]
CALLS = {
    "train": ("train", "--out"),
    "plan": ("plan", "--out"),
    "train-cache": ("train", "--cache-dir"),
    "predict": ("predict", "run", "photos", "--out"),
    "export": ("export", "run", "--out"),
    "profile": ("profile", "--activation-memory", "--chart"),
}


@pytest.mark.parametrize("call", CALLS)
def test_places_are_looked_at_before_any_work(call, snugfit, monkeypatch, tmp_path):
    monkeypatch.setattr(child_process, "_child", lambda *_: pytest.fail("work began"))
    Path("file").touch()
    Path("dangling").symlink_to("missing/place")
    for wrong in WRONG:
        outcome = snugfit(*CALLS[call], wrong, "--json")
        assert outcome.code == outcome.json["error"]["code"] == 2
        assert outcome.err.startswith("error: cannot write ") and CALLS[call][-1] in outcome.err
        assert len(outcome.err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


def test_a_folder_that_holds_something_is_refused_at_once(snugfit, monkeypatch):
    monkeypatch.setattr(child_process, "_child", lambda *_: pytest.fail("work began"))
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/model").touch()
    outcome = snugfit("train", "--out", "runs/a")
    assert outcome.code == 2 and "runs/a is not empty; choose another --out" in outcome.err


def test_runs_that_cannot_be_made_are_refused_at_once(snugfit, monkeypatch):
    monkeypatch.setattr(child_process, "_child", lambda *_: pytest.fail("work began"))
    Path("runs").touch()
    outcome = snugfit("train")
    assert outcome.code == 2 and "cannot write runs" in outcome.err and "--out" in outcome.err


def test_predictions_go_into_devices_and_through_links(snugfit):
    Path("link.csv").symlink_to("real.csv")
    assert snugfit("predict", "run", "photos", "--out", "link.csv").code == 0
    assert Path("link.csv").is_symlink() and Path("real.csv").read_text().count("\n") == 3
    full = snugfit("predict", "run", "photos", "--out", "/dev/full", "--json")
    assert (full.code, full.json["error"]["type"]) == (6, "OutOfStorageError")
    assert Path("/dev/full").is_char_device()
    assert snugfit("predict", "run", "photos", "--out", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()


GROUPS = "9:cpu:/a\n4:memory:/app/one\n0::/app\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "count"),
    [
        ("0::/app\n", {"g/app/memory.events": "low 0\noom 9\noom_kill 3\n"}, 3),
        ("0::/app\n", {"g/memory.events": "oom_kill 2\n", "p/vmstat": "oom_kill 7\n"}, 2),
        ("0::/\n", {"p/vmstat": "nr_free_pages 1\noom_kill 7\n"}, 7),
        (GROUPS, {"g/memory/app/one/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"}, 4),
        (GROUPS, {"g/memory/app/one/memory.oom_control": "under_oom 0\n", "p/vmstat": "oom_kill 5\n"}, 5),
        ("0::/app\n", {"p/vmstat": "nr_free_pages 1\n"}, None),
        (None, {}, None),
    ],
)
def test_kills_for_lack_of_memory_are_counted(cgroup, files, count, tmp_path):
    for name, text in {**files, **({} if cgroup is None else {"p/self/cgroup": cgroup})}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_kills(tmp_path / "p", tmp_path / "g") == count
