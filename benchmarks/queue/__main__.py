"""The queue's command line: start, pause, status, page."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cyclopts import Parameter

from benchmarks.common import ROOT, Options, context_megabytes, context_of, program
from benchmarks.queue.arms import Arm, Sources, all_arms
from benchmarks.queue.digest import digest_of
from benchmarks.queue.estimate import duration, seconds
from benchmarks.queue.page import page as page_of
from benchmarks.queue.page import progress, write_figures
from benchmarks.queue.rows import Rows, read_rows
from benchmarks.queue.rungs import Row, Task, order
from benchmarks.queue.runner import Place, Runner, training_seconds
from benchmarks.store import RESULTS, note

app = program("queue")


class Run(Protocol):
    """Runs a task with sources of a digest; None where it was interrupted."""

    stopped: bool

    def __call__(self, task: Task, digest: str) -> Row | None:
        """The row of a finished run."""


@Parameter(name="*")
@dataclass(frozen=True)
class Folders:
    """What every sub-command takes.

    Attributes:
        runs: folder of run folders and of the queue's lock.
        results: folder of result files.
        page: page of results, rewritten after every run.
        only: arms whose experiment and name ("NeuroFlux, vgg16, cifar10, 500 MB: classic") begin so; all by default.
    """

    runs: Path = ROOT / "runs" / "queue"
    results: Path = RESULTS
    page: Path = ROOT / "docs" / "experiments.md"
    only: str = ""

    @property
    def lock(self) -> Path:
        """File that a queue holds locked while it runs, and its run until it has ended."""
        return self.runs / "queue.lock"

    @property
    def owner(self) -> Path:
        """File that the queue's own process alone holds locked; its number stands there."""
        return self.runs / "queue.pid"

    @property
    def running(self) -> Path:
        """File with the keys of the runs that go on, one a line."""
        return self.runs / "running"

    def wanted(self, tasks: list[Task]) -> list[Task]:
        """Runs of the arms that ``only`` names; their learning rates may depend on other arms."""
        return [task for task in tasks if f"{task.arm.experiment}: {task.arm.name}".startswith(self.only)]


DEFAULTS = Folders()


@app.command
def start(
    *,
    data_dir: str | None = None,
    weights: Path | None = None,
    device: str | None = None,
    core: int | None = None,
    jobs: int = 1,
    nice: int = 10,
    limit: int | None = None,
    retry: bool = False,
    commit: bool = False,
    folders: Folders = DEFAULTS,
) -> int:
    """Run what is left until all is done or a signal comes.

    SIGTERM, Ctrl-C and ``pause`` let the run save a checkpoint; the next start continues it.

    Args:
        data_dir: where data sets are; SNUGFIT_DATA otherwise.
        weights: ImageNet weights of MobileNetV2; without them the experiments that need them wait.
        device: a GPU, like cuda; NeuroFlux's memory cap is above its context then, and arms with other caps, whose
            megabytes are a processor's, wait.
        core: processor core to run on; the last by default, and all with a GPU.
        jobs: runs at once.
        nice: added to the process's niceness.
        limit: most runs; any number by default.
        retry: run again what failed other than by an infeasible budget or divergence.
        commit: commit the result file and the page to git after every run.
        folders: where things are.
    """
    if device is None or core is not None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if core is None else core})
    os.nice(nice)
    with _locked(folders) as lock:
        given = {} if weights is None else {"mobilenet_v2": weights.resolve()}
        context = 0 if device is None or device == "cpu" else context_megabytes(context_of(device, Options()), device)
        runner = Runner(Place(folders.runs.resolve(), data_dir, given, lock, device, context))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: runner.stop())
        rows = Rows(folders.results, device or "cpu")
        shared = {"hardware": rows.machine["hardware"], "jobs": jobs, "context_mb": context} if context else {}
        found = work(folders, runner, given, capped=device is None, retry=retry, limit=limit, jobs=jobs)
        for task, row in found:
            rows.keep(row | shared)
            figures = write_page(folders)
            note(f"         {_summary(row)}")
            if commit:
                _commit([rows.path, folders.page, *figures], task.label)
        return 130 if runner.stopped else 0


def work(
    folders: Folders,
    run: Run,
    weights: dict[str, Path],
    *,
    capped: bool = True,
    retry: bool = False,
    limit: int | None = None,
    jobs: int = 1,
) -> Iterator[tuple[Task, Row]]:
    """Yield runs and their rows as they end, until nothing is left that can run or the queue is stopped.

    What comes next is decided anew after every run, from the rows and sources that there are then.
    """
    tried: set[str] = set()
    going: dict[Future[Row | None], Task] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            free = jobs - len(going) if limit is None else min(jobs - len(going), limit - len(tried))
            if not run.stopped and free:
                for task, digest in _next(folders, weights, tried, capped, retry)[:free]:
                    tried.add(task.key)
                    note(f"{time.strftime('%H:%M:%S')} {task.label}")
                    going[pool.submit(run, task, digest)] = task
            folders.runs.mkdir(parents=True, exist_ok=True)
            folders.running.write_text("\n".join(task.key for task in going.values()))
            if not going:
                return
            for ended in wait(going, return_when=FIRST_COMPLETED).done:
                task, row = going.pop(ended), ended.result()
                if row is not None:
                    yield task, row


def _next(
    folders: Folders, weights: dict[str, Path], tried: set[str], capped: bool, retry: bool
) -> list[tuple[Task, str]]:
    """What can run now, in order, each with the digest of its sources."""
    digests = _digests(all_arms())
    left = folders.wanted(order(all_arms(), read_rows(folders.results), digests, retry))
    possible = [task for task in left if capped or task.arm.above_context or "memory" not in task.settings]
    return [(task, digests[task.arm.sources]) for task in possible if _ready(task, weights) and task.key not in tried]


def _ready(task: Task, weights: dict[str, Path]) -> bool:
    return not task.provisional and task.settings.get("weights") in (None, *weights)


def _digests(arms: list[Arm]) -> dict[Sources, str]:
    return {sources: digest_of(*sources) for sources in {arm.sources for arm in arms}}


@app.command
def pause(*, folders: Folders = DEFAULTS) -> int:
    """Let the queue's run save a checkpoint, and wait until the queue has ended; ``start`` continues it.

    Args:
        folders: where things are.
    """
    folders.runs.mkdir(parents=True, exist_ok=True)
    with folders.lock.open("a+") as file:
        if _free(file.fileno()):
            note("no queue is running")
            return 1
        if not _ask_to_end(folders.owner):
            note("the queue was killed; its run saves a checkpoint")
        fcntl.flock(file, fcntl.LOCK_EX)
    note("paused; python -m benchmarks.queue start continues")
    return 0


@app.command
def status(*, ahead: int = 5, folders: Folders = DEFAULTS) -> None:
    """Show what is done, what runs, what comes next, and the time left.

    Args:
        ahead: how many of the next runs to name.
        folders: where things are.
    """
    rows = read_rows(folders.results)
    left = folders.wanted(order(all_arms(), rows, _digests(all_arms())))
    running = folders.running.read_text().split() if folders.running.exists() and _busy(folders) else []
    print(progress(left, rows, running))
    for task in [task for task in left if task.key in running]:
        spent, whole = training_seconds(folders.runs / task.key) or 0.0, seconds(task, rows.values())
        print(f"\nrunning: {task.label}; {duration(spent)} of training done, {duration(whole)} expected")
    print("\nnext:" if running else "\nno queue is running; next:")
    for task in [task for task in left if task.key not in running][:ahead]:
        print(f"  {task.label} ({duration(seconds(task, rows.values()))})")


def _busy(folders: Folders) -> bool:
    with folders.lock.open("a+") as file:
        return not _free(file.fileno())


@app.command
def page(*, check: bool = False, folders: Folders = DEFAULTS) -> int:
    """Write the page of results.

    Args:
        check: write nothing, and exit 1 where the page is not up to date.
        folders: where things are.
    """
    if check:
        fresh = folders.page.exists() and folders.page.read_text() == page_of(all_arms(), read_rows(folders.results))
        return int(not fresh)
    write_page(folders)
    return 0


def write_page(folders: Folders) -> list[Path]:
    """Write the page of all experiments, and its figures next to it; returns the paths of the figures."""
    rows = read_rows(folders.results)
    folders.page.write_text(page_of(all_arms(), rows))
    return write_figures(all_arms(), rows.values(), folders.page.parent / "figures")


def _summary(row: Row) -> str:
    if row["exit_code"]:
        return f"exit {row['exit_code']}: {(row['error'] or 'no message').splitlines()[0]}"
    return f"{duration(row['seconds'])}, validation {row['val']:.3f}, test {row['test']:.3f}"


def _free(descriptor: int) -> bool:
    """Take a lock file's lock if nobody holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ask_to_end(owner: Path) -> bool:
    """Send SIGTERM to the queue, if it lives: of one that was killed, the number may be another process's by now."""
    with owner.open("a+") as file:
        if _free(file.fileno()):
            return False
        file.seek(0)
        os.kill(int(file.read()), signal.SIGTERM)
    return True


@contextmanager
def _locked(folders: Folders) -> Iterator[int]:
    """Hold the queue's locks; a run that a killed queue left may take a while to end."""
    folders.runs.mkdir(parents=True, exist_ok=True)
    with folders.lock.open("a+") as file, folders.owner.open("a+") as own:
        deadline = time.monotonic() + 60
        while not _free(file.fileno()):
            if time.monotonic() > deadline:
                raise SystemExit(f"another queue works in {folders.runs}; `pause` ends it.")
            time.sleep(1)
        fcntl.flock(own, fcntl.LOCK_EX)
        own.truncate(0)
        own.write(str(os.getpid()))
        own.flush()
        yield file.fileno()


def _commit(paths: list[Path], label: str) -> None:
    for command in (["add", "--", *map(str, paths)], ["commit", "-m", "Record an experiment", "-m", label]):
        subprocess.run(["git", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(app())
