"""Signals, full disks and damaged files in the middle of a run: one clear error, and nothing is lost."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import NETWORKS, start

import snugfit
from snugfit._training.events import EpochDone, Event
from snugfit.errors import InterruptedRunError, SnugfitError

SMALL = {"image_size": 16, "max_train": 96, "max_val": 40, "batch_size": 16}


def blocks(**changed: object) -> list[str]:
    """Options of a short run on digits in which every unit is a block."""
    chosen = {
        **SMALL, "model": "tiny_nets:cnn", "data": "digits", "epochs": 1, "max_train": 300, "strategy": "blockwise",
        "local_loss": "linear", "block_units": 1, "batch_limit": 16, "memory": "80MB", **changed,
    }  # fmt: skip
    return [part for name, value in chosen.items() for part in (f"--{name.replace('_', '-')}", str(value))]


class Command:
    """A `snugfit` command in a process of its own, its stderr in a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.errors = folder / f"stderr{len(list(folder.glob('stderr*')))}"
        with self.errors.open("w") as stderr:
            self.process = start(*arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)

    def when(self, condition: Callable[[], bool], seconds: float = 120.0) -> Command:
        """Wait until something holds, while the command runs."""
        started = time.monotonic()
        while not condition():
            assert self.process.poll() is None, f"it ended first: {self.said}"
            assert time.monotonic() - started < seconds, f"it never happened: {self.said}"
            time.sleep(0.002)
        return self

    def ends(self) -> int:
        """Its exit code."""
        code = self.process.wait(timeout=200)
        assert "Traceback" not in self.said
        return code

    @property
    def said(self) -> str:
        return self.errors.read_text()


def has_file(run: Path, pattern: str) -> bool:
    """Whether a file of that name is in the run's folder; folders may go while they are searched."""
    try:
        return any(run.rglob(pattern))
    except FileNotFoundError:
        return False


MOMENTS: dict[str, Callable[[Command, Path], bool]] = {
    "while it measures": lambda command, run: "measuring" in command.said,
    "before the first epoch ends": lambda command, run: (run / "metrics.csv").exists(),
    "while a cache is written": lambda command, run: has_file(run, "block0-train*"),
}


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "while it measures"),
        (signal.SIGTERM, "while a cache is written"),
        pytest.param(signal.SIGINT, "before the first epoch ends", marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_cleanly_and_the_run_goes_on(tmp_path: Path, number: int, moment: str) -> None:
    run = tmp_path / "run"
    epochs = 500 if moment == "while it measures" else 1  # a busy machine may send it seconds later
    command = Command(tmp_path, "train", *blocks(out=run, epochs=epochs))
    command.when(lambda: MOMENTS[moment](command, run)).process.send_signal(number)
    sent = command.said
    assert command.ends() == 130, f"{command.said}\nwhen the signal was sent:\n{sent}"
    if (run / "plan.json").exists():
        assert "--resume" in command.said.splitlines()[-1]
        resumed = Command(tmp_path, "train", "--resume", str(run))
        assert resumed.ends() == 0, resumed.said
        assert (run / "model.safetensors").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(disk)]
    if mount is None or os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Take what is free on a file system."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        free = shutil.disk_usage(disk).free
        while free > 0:
            try:
                os.posix_fallocate(file.fileno(), 0, free)
                break
            except OSError as error:
                assert error.errno == errno.ENOSPC
                free -= 1 << 20
    return filler


def test_a_disk_that_fills_up_in_mid_write_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    """The cache is checked against the free space before it is written; here the space goes while it is."""
    run = tmp_path / "run"
    command = Command(tmp_path, "train", *blocks(
        image_size=32, batch_limit=128, cache_dtype="float32", max_train=1400, out=run, cache_dir=small_disk,
    ))  # fmt: skip
    command.when(lambda: any(small_disk.rglob("block0-train*")))
    filler = fill(small_disk)
    assert command.ends() == 6, command.said
    error, hint = command.said.splitlines()[-2:]
    assert str(small_disk) in error and hint == f"`snugfit train --resume {run}` continues the run."
    filler.unlink()
    resumed = Command(tmp_path, "train", "--resume", str(run))
    assert resumed.ends() == 0, resumed.said


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny networks have names."""
    monkeypatch.syspath_prepend(NETWORKS)


def stopped_run(run: Path, network: str) -> Path:
    """A run that was stopped after its first epoch."""

    def stop(event: Event) -> None:
        if isinstance(event, EpochDone):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(InterruptedRunError):
        snugfit.plan(f"tiny_nets:{network}", "digits", strategy="backprop", epochs=2, **SMALL).run((stop,), out=run)
    return run


@pytest.mark.usefixtures("networks")
def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    ours, other = stopped_run(tmp_path / "ours", "cnn"), stopped_run(tmp_path / "other", "normless")
    files = [file for file in sorted((ours / "checkpoint").rglob("*")) if file.is_file()]
    tensors = max(files, key=lambda file: file.stat().st_size)
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[: len(whole) // 2])
    command = Command(tmp_path, "train", "--resume", str(ours))
    assert command.ends() == 4 and "checkpoint" in command.said.splitlines()[-1].lower(), command.said
    tensors.write_bytes(whole)
    kept = tmp_path / "kept"
    shutil.move(ours / "checkpoint", kept)
    shutil.copytree(other / "checkpoint", ours / "checkpoint")
    with pytest.raises(SnugfitError) as caught:
        snugfit.resume(ours, ())
    assert caught.value.exit_code == 4
    shutil.rmtree(ours / "checkpoint")
    shutil.move(kept, ours / "checkpoint")
    assert snugfit.resume(ours, ()).phases[0].epochs == 2
