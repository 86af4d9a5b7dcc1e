"""What a soak starts and looks at: commands in processes of their own, run folders, and what they leave behind."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT, Settings, last_json, to_flags

NETWORKS = ROOT / "tests" / "conformance"
MARK = "SNUGFIT_SOAK"
_GRACE_SECONDS = 10.0
_EMPTY_OF_TORCH = re.compile("torchinductor_")
"""Folder that torch makes in TMPDIR; complained of only where something is in it."""
_DRAWN_LAST = {"report.html"}
"""What a run that is interrupted after its end lacks; ``snugfit report`` draws it."""
_UNFINISHED = re.compile(r"\.tmp$|\.part$|\.draft$")


@dataclass(frozen=True)
class Place:
    """Where a soak works.

    Attributes:
        folder: for run folders, temporary files and kept profiles.
        data_dir: where data sets are, if not in the package.
        timeout: seconds after which a command counts as hung.
    """

    folder: Path
    data_dir: str | None = None
    timeout: float = 600.0

    @property
    def temporary(self) -> Path:
        """TMPDIR of every command, which must be empty after it."""
        return self.folder / "tmp"


class Hung(Exception):  # noqa: N818  (a verdict, and no error of this code)
    """A command did not end in time."""


class Command:
    """A ``snugfit`` command in a session of its own; its output goes into files."""

    def __init__(self, place: Place, words: list[str], file_bytes: int | None = None) -> None:
        place.temporary.mkdir(parents=True, exist_ok=True)
        self.place, self.words = place, words
        environment = {
            **os.environ, MARK: str(place.folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(place.temporary),
            "XDG_CACHE_HOME": str(place.folder / "cache"),
            "PYTHONPATH": os.pathsep.join([str(NETWORKS), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        if place.data_dir:
            environment["SNUGFIT_DATA"] = place.data_dir
        self._stdout, self._stderr = place.folder / "stdout", place.folder / "stderr"

        def limit() -> None:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "snugfit", *words], stdout=stdout, stderr=stderr, env=environment,
                cwd=place.folder, start_new_session=True, preexec_fn=limit,  # noqa: PLW1509  (no threads here)
            )  # fmt: skip

    def after(self, seconds: float) -> bool:
        """Wait some seconds; whether the command still runs then."""
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def worker(self) -> int | None:
        """Process that trains; None where there is none yet."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def send(self, number: int, to_worker: bool = False) -> bool:
        """Send a signal; whether there was a process to get it."""
        pid = self.worker() if to_worker else self.process.pid
        if pid is None or self.process.poll() is not None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def ends(self) -> int:
        """Exit code, negative for a signal.

        Raises:
            Hung: it did not end in time; it is killed then.
        """
        try:
            return self.process.wait(timeout=self.place.timeout)
        except subprocess.TimeoutExpired:
            for pid in (self.worker(), self.process.pid):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            raise Hung(f"no end after {self.place.timeout:.0f} s: snugfit {' '.join(self.words[:3])}") from None

    @property
    def said(self) -> str:
        """What it wrote on stderr."""
        return self._stderr.read_text(errors="replace")

    @property
    def output(self) -> dict[str, object]:
        """The JSON object that it printed."""
        return last_json(self._stdout.read_text(errors="replace"))


def start(place: Place, settings: Settings, run: Path, file_bytes: int | None = None) -> Command:
    """Start a run."""
    return Command(place, ["train", *to_flags(settings), "--quiet", "--json", "--out", str(run)], file_bytes)


def resume(place: Place, settings: Settings, run: Path) -> Command:
    """Continue a run; one that was stopped before it had anything to continue from is started again."""
    if not (run / "plan.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        return start(place, settings, run)
    return Command(place, ["train", "--quiet", "--json", "--resume", str(run)])


def weights_of(run: Path) -> str:
    """Digest of a finished run's weights."""
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def batches_of(run: Path) -> list[int]:
    """Batch size of each phase of a finished run."""
    return [phase["batch_size"] for phase in json.loads((run / "record.json").read_text())["phases"]]


def names_in(run: Path) -> set[str]:
    """Names of a run folder's files, numbers left out, since checkpoints are numbered as they come."""
    return {re.sub(r"\d+", "N", str(path.relative_to(run))) for path in run.rglob("*") if path.is_file()}


def leftovers(place: Place, run: Path, expected: set[str]) -> list[str]:
    """Complaints about files that a finished run should not have left: half-written, temporary, or too few."""
    ours = [
        path
        for path in sorted(place.temporary.iterdir())
        if not _EMPTY_OF_TORCH.match(path.name) or any(path.iterdir())
    ]
    found = [f"left in the temporary folder: {path.name}" for path in ours]
    names = names_in(run)
    found += [f"left in the run folder: {name}" for name in sorted(names - expected)]
    found += [f"missing from the run folder: {name}" for name in sorted(expected - names - _DRAWN_LAST)]
    return found + [f"half-written: {name}" for name in sorted(names) if _UNFINISHED.search(name)]


def orphans(place: Place) -> list[int]:
    """Processes of this soak that still live, after a grace period for those that are ending."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (found := _marked(place)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _marked(place: Place) -> list[int]:
    mark = f"{MARK}={place.folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if int(path.parent.name) != os.getpid() and mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
