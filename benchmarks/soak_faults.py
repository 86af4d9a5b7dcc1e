"""What a soak does to runs: a fault is a function that runs, disturbs and continues a run, and names what went wrong.

Every run must end with the weights of an uninterrupted one, or with the documented exit code of what was done to it.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import Settings
from benchmarks.soak_runs import Command, Place, batches_of, resume, start, weights_of

INTERPRETER_SECONDS = 0.2
"""Python itself starts for so long, before any code of ours can catch a signal."""
INTERNAL, UNREADABLE, EXCEEDED, STORAGE, LOST, INTERRUPTED, INFEASIBLE = 1, 4, 5, 6, 8, 130, 3


@dataclass
class Reference:
    """An uninterrupted run.

    Attributes:
        settings: its flags.
        run: its folder, as it was left.
        weights: digest of its weights.
        names: names of its files, numbers left out.
        seconds: how long it took.
        peak_bytes: its measured peak.
    """

    settings: Settings
    run: Path
    weights: str
    names: set[str]
    seconds: float
    peak_bytes: int


@dataclass
class Trial:
    """One trial as it goes on.

    Attributes:
        place: where it works.
        reference: what it must end like.
        run: its run folder.
        draw: where its random numbers come from.
        did: what was done, in words.
        codes: exit codes, in order.
        failures: what should not have been.
        finished: whether the run came to its end, so that its files can be looked at.
        refused: whether the system may have refused memory; a phase then goes on at a smaller batch.
    """

    place: Place
    reference: Reference
    run: Path
    draw: random.Random
    did: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    finished: bool = False
    refused: bool = False

    def start(self, file_bytes: int | None = None, **changed: object) -> Command:
        """Start the run."""
        return start(self.place, {**self.reference.settings, **changed}, self.run, file_bytes)

    def moment(self) -> float:
        """Seconds into the run, at random."""
        return self.draw.uniform(0.0, self.reference.seconds)

    def end(self, command: Command, allowed: set[int]) -> int:
        """Wait for a command, and judge its exit code and what it said."""
        code = command.ends()
        self.codes.append(code)
        if code not in allowed:
            said = " / ".join(command.said.strip().splitlines()[-3:])
            self.failures.append(f"exit code {code}, not one of {sorted(allowed)}: {said[-400:]}")
        if "Traceback" in command.said:
            shown = command.said[command.said.index("Traceback") :].strip().splitlines()
            self.failures.append(f"a traceback was shown: {' / '.join(line.strip() for line in shown[-5:])[-500:]}")
        return code

    def finish(self) -> None:
        """Continue the run to its end, undisturbed, and compare its weights."""
        ended = (self.run / "record.json").is_file()
        if not ended and self.end(resume(self.place, self.reference.settings, self.run), {0}) != 0:
            return
        self.finished = True
        if weights_of(self.run) == self.reference.weights:
            return
        if self.refused and (batches := batches_of(self.run)) != batches_of(self.reference.run):
            self.did.append(f"trained at batches of {batches}, as its record says")
        else:
            self.failures.append("the weights differ from those of the uninterrupted run")


Fault = Callable[[Trial], None]


def interrupted(trial: Trial) -> None:
    """SIGINT or SIGTERM, up to three times at random moments; then to the end."""
    for _ in range(trial.draw.randint(1, 3)):
        number = trial.draw.choice((signal.SIGINT, signal.SIGTERM))
        _signalled(trial, number, to_worker=False, codes={0, INTERRUPTED})
    trial.finish()


def killed(trial: Trial) -> None:
    """SIGKILL, up to three times at random moments, of the command or of the process that trains."""
    for _ in range(trial.draw.randint(1, 3)):
        to_worker = trial.draw.random() < 0.5
        codes = {0, LOST} if to_worker else {0, -signal.SIGKILL}
        _signalled(trial, signal.SIGKILL, to_worker=to_worker, codes=codes)
    trial.finish()


def _signalled(trial: Trial, number: int, *, to_worker: bool, codes: set[int]) -> None:
    if (trial.run / "record.json").is_file():
        return
    command = resume(trial.place, trial.reference.settings, trial.run) if trial.codes else trial.start()
    seconds = trial.moment()
    hit = command.after(seconds) and command.send(number, to_worker)
    if hit:
        whom = "the trainer" if to_worker else "the command"
        trial.did.append(f"{signal.Signals(number).name} to {whom} after {seconds:.1f} s")
        if seconds < INTERPRETER_SECONDS:
            codes = codes | {-number}
    trial.end(command, codes if hit else {0})


def small_disk(trial: Trial) -> None:
    """The run folder on a file system with too little space; then with enough. Files limited instead without root."""
    share = trial.draw.uniform(0.02, 1.5)
    needed = sum(path.stat().st_size for path in trial.reference.run.rglob("*") if path.is_file())
    with _disk(trial.run, int(share * needed)) as grow:
        if grow is None:
            return small_files(trial)
        trial.did.append(f"a disk of {share:.2f} times the run's files")
        trial.end(trial.start(), {0, STORAGE})
        grow()
        trial.finish()
        if trial.finished:
            shutil.copytree(trial.run, trial.run.with_name("copy"))
    if trial.finished:
        trial.run.with_name("copy").rename(trial.run)
    return None


@contextmanager
def _disk(folder: Path, size: int) -> Iterator[Callable[[], None] | None]:
    """A file system of some bytes at ``folder``, with a function that gives it more; None without the right to."""

    def mount(options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return os.getuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0

    def grow() -> None:
        if not mount("remount,size=2g"):
            raise RuntimeError(f"the file system at {folder} does not grow")

    folder.mkdir()
    if not mount(f"size={max(size, 4096)}"):
        folder.rmdir()
        yield None
        return
    try:
        yield grow
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def small_files(trial: Trial) -> None:
    """A limit on the size of a file (RLIMIT_FSIZE); then none."""
    largest = max(path.stat().st_size for path in trial.reference.run.rglob("*") if path.is_file())
    size = int(trial.draw.uniform(0.01, 1.2) * largest)
    trial.did.append(f"files of at most {size} bytes")
    trial.end(trial.start(size), {0, STORAGE})
    trial.finish()


def small_memory(trial: Trial) -> None:
    """The address space of the process that trains is limited at a random moment; then it is not.

    Never before there is a plan: an interpreter that gets no memory for its imports dies as it pleases. Nor can it be
    helped that oneDNN crashes where the system refuses it address space for a kernel (docs/design.md); that is reported
    as a fault in native code, and the run can be resumed.
    """
    command, seconds = trial.start(), trial.moment()
    more = trial.draw.randint(0, 20_000_000)
    started = command.after(seconds) and (trial.run / "plan.json").is_file()
    worker = command.worker() if started else None
    if worker is not None:
        with suppress(OSError, IndexError):  # it ended meanwhile, and nothing was done to it
            size = int(Path(f"/proc/{worker}/statm").read_text().split()[0]) * resource.getpagesize() + more
            resource.prlimit(worker, resource.RLIMIT_AS, (size, size))
            trial.did.append(f"{more / 1e6:.1f} MB more after {seconds:.1f} s, and no byte beyond")
            trial.refused = True
    crashed = command.ends() == INTERNAL and "killed by SIGSEGV" in command.said
    trial.end(command, {INTERNAL} if crashed and trial.refused else {0, EXCEEDED})
    trial.finish()


def small_budget(trial: Trial) -> None:
    """A budget below what the run takes: it fits and keeps to it, or is infeasible."""
    budget = int(trial.draw.uniform(0.2, 1.1) * trial.reference.peak_bytes)
    trial.did.append(f"a budget of {budget / 1e6:.1f} MB")
    command = trial.start(memory=f"{budget}B")
    if trial.end(command, {0, INFEASIBLE}) == 0:
        peak = command.output["measured"]["peak_bytes"]  # type: ignore[index]
        if peak > budget:
            trial.failures.append(f"measured {peak} bytes in a budget of {budget}")


def damaged(trial: Trial) -> None:
    """A run is killed, and a byte of one of its files flipped or its end cut off: named, or without effect."""
    _signalled(trial, signal.SIGKILL, to_worker=False, codes={0, -signal.SIGKILL})
    files = sorted(path for path in trial.run.rglob("*") if path.is_file() and path.stat().st_size)
    if not files or not (trial.run / "plan.json").is_file():
        return trial.finish()
    _damage(trial, trial.draw.choice(files))
    if (trial.run / "record.json").is_file():
        code = trial.end(Command(trial.place, ["evaluate", str(trial.run), "--json", "--quiet"]), {0, UNREADABLE})
        same = weights_of(trial.run) == trial.reference.weights
        if code == 0 and not same:
            trial.failures.append("damaged weights were evaluated without a word")
        return None
    if trial.end(resume(trial.place, trial.reference.settings, trial.run), {0, UNREADABLE}) == 0:
        trial.finished = True
        if weights_of(trial.run) != trial.reference.weights:
            trial.failures.append("a damaged file changed the weights without a word")
    return None


def _damage(trial: Trial, path: Path) -> None:
    content = bytearray(path.read_bytes())
    size, where = len(content), trial.draw.randrange(len(content))
    if trial.draw.random() < 0.5:
        content[where] ^= 1 << trial.draw.randrange(8)
        what = f"a bit of byte {where} flipped"
    else:
        del content[where:]
        what = f"cut off at byte {where}"
    path.write_bytes(content)
    trial.did.append(f"{path.relative_to(trial.run)} of {size} bytes: {what}")


FAULTS: dict[str, Fault] = {
    "interrupted": interrupted,
    "killed": killed,
    "damaged files": damaged,
    "small disk": small_disk,
    "small files": small_files,
    "small memory": small_memory,
    "small budget": small_budget,
}
