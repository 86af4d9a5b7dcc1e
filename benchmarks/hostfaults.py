"""Faults of hosts in a launch over several of them: one trial is one launch, one fault, and the wait for progress."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import netns

SINGLE = ("kill worker", "stop worker", "kill host", "stop host", "cut", "slow")
GATEWAY = ("kill worker", "stop worker", "kill host", "stop host", "cut")
_SLOW = "16kbit"
_EPOCHS_BEYOND = 3
"""An epoch may end right after the fault without the lost host; so many show that training goes on."""
_START_SECONDS = 180.0
_END_SECONDS = 90.0
_POLL_SECONDS = 0.1
_WORKER = "snugfit._cli.worker"
TRAIN = (
    "train", "--model", "smallconv", "--data", "digits", "--image-size", "16", "--max-train", "96", "--max-val", "40",
    "--batch-size", "32", "--strategy", "tiled", "--threads", "1", "--out", "run", "--quiet",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One seeded fault.

    Attributes:
        seed: from which the rest is drawn.
        count: hosts at the start.
        faults: what happens to which host, by number; 0 is the gateway's.
        epochs: after so many, and ``seconds`` more.
        seconds: until the fault.
    """

    seed: int
    count: int
    faults: tuple[tuple[str, int], ...]
    epochs: int
    seconds: float

    def __str__(self) -> str:
        """In words."""
        return ", ".join(f"{fault}{' (gateway)' if host == 0 else ''}" for fault, host in self.faults)


def draw(seed: int) -> Trial:
    """The trial of a seed: one host, two at once, or the gateway; at least two agents remain but for the gateway's."""
    source = random.Random(seed)
    kind = source.choice(("one", "one", "two", "gateway"))
    count = 4 if kind == "two" else source.choice((3, 4))
    victims = [0] if kind == "gateway" else source.sample(range(1, count), 2 if kind == "two" else 1)
    choices = GATEWAY if kind == "gateway" else SINGLE
    faults = tuple((source.choice(choices), victim) for victim in victims)
    return Trial(seed, count, faults, source.randint(1, 5), source.uniform(0, 2))


def run_trial(trial: Trial, folder: Path, limit: float = 30.0, timeout: str = "10s") -> dict[str, Any]:
    """Launch, do harm, and wait until training goes on; the launch is interrupted in the end.

    Args:
        trial: what happens.
        folder: an empty one.
        limit: seconds within which training must go on.
        timeout: ``--timeout`` of the launch.

    Returns:
        ``went_on_seconds`` (None where it did not within twice the limit), ``within_limit``, ``hosts_left`` (that took
        part in the end), ``leftovers`` (processes that outlive it), ``launch_code``, and ``said`` if that failed.
    """
    with netns.hosts(trial.count) as made:
        launch = started(made, folder, "--timeout", timeout, "--max-restarts", "5", "--", *TRAIN, "--epochs", "100000")
        said = _Said(launch)
        try:
            _until(lambda: epochs(folder) >= trial.epochs, _START_SECONDS, launch)
            time.sleep(trial.seconds)
            before = epochs(folder)
            for fault, victim in trial.faults:
                harm(fault, made[victim])
            since = time.monotonic()
            with contextlib.suppress(TimeoutError):
                _until(lambda: epochs(folder) >= before + _EPOCHS_BEYOND, 2 * limit, launch)
            seconds = time.monotonic() - since if epochs(folder) >= before + _EPOCHS_BEYOND else None
            launch.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.wait(_END_SECONDS)
            left = leftovers(made)
        finally:
            launch.kill()
            launch.wait()
    found = {
        "went_on_seconds": None if seconds is None else round(seconds, 2),
        "within_limit": seconds is not None and seconds <= limit,
        "hosts_left": said.hosts(trial.count), "leftovers": left, "launch_code": launch.returncode,
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    failed = not found["within_limit"] or left or launch.returncode != 130
    return {**found, "said": said.text()[-3000:]} if failed else found


def started(made: Sequence[netns.Host], folder: Path, *arguments: str, stdin: Any = None) -> subprocess.Popen[str]:
    """``snugfit cluster launch`` over hosts, which it finds in a file and reaches by a stand-in for ssh."""
    there = {"python": sys.executable, "directory": str(folder)}
    (folder / "cluster.yaml").write_text(json.dumps({"hosts": [{"address": each.address, **there} for each in made]}))
    command = [sys.executable, "-m", "snugfit", "cluster", "launch", "--hosts", "cluster.yaml", *arguments]
    environment = {**os.environ, **netns.ssh_into(made, folder)}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


class _Said:
    """What a launch prints, read as it comes so that it never waits."""

    def __init__(self, launch: subprocess.Popen[str]) -> None:
        self._lines: list[str] = []
        self._launch = launch
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._launch.stdout is not None
        self._lines.extend(self._launch.stdout)

    def text(self) -> str:
        return "".join(list(self._lines))

    def hosts(self, count: int) -> int:
        """How many took part in the last round."""
        rounds: list[str] = re.findall(r"restart \d+ of \d+, with (\d+) of", self.text())
        return int(rounds[-1]) if rounds else count


def epochs(folder: Path) -> int:
    """The last epoch that a run has a line of; -1 where there is none."""
    with contextlib.suppress(OSError):
        lines = (folder / "run" / "metrics.csv").read_text().splitlines()[1:]
        return max((int(line.split(",")[1]) for line in lines if line.count(",") > 2), default=-1)
    return -1


def harm(fault: str, host: netns.Host) -> None:
    """Do something bad to a host, or to the process that trains there."""
    if fault == "cut":
        host.cut()
    elif fault == "slow":
        host.shape(_SLOW)
    else:
        what, _, whom = fault.partition(" ")
        number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
        found = [each for each in processes(host) if whom == "host" or _WORKER in " ".join(each.cmdline())]
        for each in found:
            each.send_signal(number)


def processes(host: netns.Host) -> list[psutil.Process]:
    """What runs on a host."""
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True).stdout.split()
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def leftovers(made: Sequence[netns.Host], patience: float = 10.0) -> list[str]:
    """Command lines of what still runs on hosts after a launch has ended, and some patience."""
    deadline = time.monotonic() + patience
    while (found := [each for host in made for each in processes(host)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    lines = []
    for each in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(" ".join(each.cmdline()))
    return lines


def _until(done: Any, seconds: float, launch: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline or launch.poll() is not None:
            raise TimeoutError(f"nothing within {seconds:g} s")
        time.sleep(_POLL_SECONDS)
