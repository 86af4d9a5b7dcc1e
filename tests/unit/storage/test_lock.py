"""One process at a time in a run folder; a killed one leaves no lock behind."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from snugfit._storage import lock
from snugfit._storage.lock import LOCK_FILE, run_lock
from snugfit.errors import UsageError

HOLD = """
import sys, time
from pathlib import Path
from snugfit._storage.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.0)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(UsageError, match=f"another process is at work on the run in {tmp_path}"),
            run_lock(tmp_path),
        ):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with run_lock(tmp_path):
        assert (tmp_path / LOCK_FILE).exists()


def test_a_lock_file_alone_locks_nothing_and_no_folder_needs_none(tmp_path):
    (tmp_path / LOCK_FILE).write_text("4711")
    for _ in range(2):
        with run_lock(tmp_path):
            pass
    with run_lock(tmp_path / "none"):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / LOCK_FILE]


def test_an_error_inside_gives_the_lock_back(tmp_path):
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path):
        raise ZeroDivisionError
    with run_lock(tmp_path):
        pass


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot lock the run folder"), run_lock(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()
