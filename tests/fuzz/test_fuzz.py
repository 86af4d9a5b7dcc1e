"""Every reader on damaged files, for a bounded number of trials; and that fuzzing finds what it is made to find.

``python -m benchmarks.fuzz`` goes on for as long as one likes.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from benchmarks.fuzz.damage import damage
from benchmarks.fuzz.hunt import CORPUS, Trial, hunt, kept_trials
from benchmarks.fuzz.readers import READERS

import snugfit
from snugfit._storage.manifest import Manifest
from snugfit.errors import CheckpointError

TRIALS = 8
SLOW = {"run": 3, "report": 3}
PATIENCE = 100.0
"""Seconds until a trial hangs; the slowest takes under one on an idle machine."""


@pytest.mark.parametrize("name", READERS)
def test_good_files_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzzer whose files are refused from the start finds nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(CORPUS / name / "good", tmp_path / "tree")
    READERS[name](tmp_path / "tree")


@pytest.mark.timeout(600)
def test_damaged_files_are_read_or_refused() -> None:
    trials = [*kept_trials(READERS), *(Trial(name, seed) for name in READERS for seed in range(SLOW.get(name, TRIALS)))]
    failures = [failure for failure in hunt(trials, PATIENCE) if failure is not None]
    assert not failures, "\n\n".join(f"{failure.trial}: {failure.reason}" for failure in failures)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name in ("hangs", "spins", "crashes", "grows", "raises", "says_nothing", "exits", "refuses", "reads"):
        (tmp_path / name / "good").mkdir(parents=True)
        (tmp_path / name / "good" / "file.txt").write_text("text")
    return tmp_path


@pytest.mark.slow
def test_defects_are_found(corpus: Path) -> None:
    """Each in a process that goes on, or a new one."""
    names = ["reads", "raises", "crashes", "grows", "says_nothing", "hangs", "exits", "refuses", "spins", "reads"]
    found = list(hunt([Trial(name, 0) for name in names], 4, corpus, "tests.fuzz.bad_readers"))
    reasons = ["" if failure is None else failure.reason for failure in found]
    assert [bool(reason) for reason in reasons] == [False, True, True, True, True, True, True, False, True, False]
    for place, part in ((1, "KeyError: 'field'"), (2, "Segmentation fault"), (3, "MemoryError"), (4, "no message"),
                        (5, "hangs"), (6, "SystemExit"), (8, "hangs")):  # fmt: skip
        assert part in reasons[place], reasons[place]


def tree(root: Path) -> dict[str, object]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() and path.stat().st_size < 1 << 20 else ""
        for path in sorted(root.rglob("*"))
        if not path.is_symlink()
    }


def test_a_seed_does_the_same_damage_each_time(tmp_path: Path) -> None:
    made = []
    for seed in (*range(30), *range(30)):
        root = tmp_path / str(len(made))
        shutil.copytree(CORPUS / "yolo" / "good", root)
        damage(root, random.Random(seed))
        made.append(tree(root))
    assert made[:30] == made[30:]
    assert all(one != tree(CORPUS / "yolo" / "good") for one in made[:30]) or len({str(one) for one in made[:30]}) > 25


@pytest.mark.parametrize("name", ["no-local-loss", "exit-beyond-the-end"])
def test_an_architecture_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    shutil.copytree(CORPUS / "run" / "good", tmp_path / "run")
    shutil.copy(CORPUS / "run" / name / "architecture.json", tmp_path / "run")
    Manifest.of(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"architecture\.json does not describe the model that is saved \("):
        snugfit.load(tmp_path / "run")
