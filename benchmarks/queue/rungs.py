"""The order of work: which run of which arm comes next, given the rows that there are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import INFEASIBLE, Settings, to_flags
from benchmarks.queue.arms import SEEDS, Arm, Sources

Row = dict[str, Any]
DIVERGED = 7
RUNGS = ("short", "medium", "full")
_LIMITS: tuple[tuple[int | None, int | None, int | None], ...] = ((2_000, 10, 1_000), (10_000, 25, 2_000), (None,) * 3)
"""Training images, epochs, and validation (and test) images of each rung; None is all, and the paper's epochs."""
_WORTHWHILE = 2.0
"""A rung is skipped where the next one sees less than this many times its images: it would tell the same."""

_MORE_RATES = 2
"""Most learning rates that are tried beyond an arm's own."""


@dataclass(frozen=True)
class Task:
    """One run.

    Attributes:
        arm: what it belongs to.
        rung: index in :data:`RUNGS`.
        seed: seed.
        lr: learning rate, where the arm tunes it.
        provisional: the learning rate is not chosen yet, so that it cannot run.
        stale: there is a row of other sources.
    """

    arm: Arm
    rung: int
    seed: int
    lr: float | None = None
    provisional: bool = False
    stale: bool = False

    @property
    def images(self) -> int:
        """Training images of an epoch."""
        return _images(self.arm, self.rung)

    @property
    def epochs(self) -> int:
        """Passes over them."""
        return _epochs(self.arm, self.rung)

    @property
    def settings(self) -> Settings:
        """Flags of the run, ``weights`` by name."""
        return {**self.arm.implied, **self._named}

    @property
    def _named(self) -> Settings:
        """The flags that the name of the run depends on."""
        most, _, most_val = _LIMITS[self.rung]
        limits = {"max_train": most, "max_val": most_val} if most is not None and most < self.arm.images else {}
        tuned = {} if self.lr is None else {"lr": self.lr}
        longer = self.arm.longer if self.rung != rungs_of(self.arm)[0] else {}
        return {**self.arm.settings, **longer, **tuned, **limits, "epochs": self.epochs, "seed": self.seed}

    @property
    def key(self) -> str:
        """Name of the run: a digest of its settings."""
        return hashlib.sha256(" ".join(to_flags(self._named)).encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """One line that says which run this is."""
        tuned = "" if self.lr is None else f", lr {self.lr:g}"
        return f"{self.arm.experiment}: {self.arm.name}, {RUNGS[self.rung]}, seed {self.seed}{tuned}"


def _images(arm: Arm, rung: int) -> int:
    most = _LIMITS[rung][0]
    return arm.images if most is None else min(most, arm.images)


def _epochs(arm: Arm, rung: int) -> int:
    most = _LIMITS[rung][1]
    return arm.epochs if most is None else min(most, arm.epochs)


def rungs_of(arm: Arm) -> list[int]:
    """Rungs of an arm: those that are much shorter than the next one, and the last.

    The first of them moves to the first place, where the others of an arm leave it: all arms have a short run.
    """
    passes = [_images(arm, rung) * _epochs(arm, rung) for rung in range(len(RUNGS))]
    last = len(RUNGS) - 1
    return [rung for rung in range(last) if passes[rung + 1] >= _WORTHWHILE * passes[rung]] + [last]


def order(
    arms: Iterable[Arm], rows: Mapping[str, Row], digests: Mapping[Sources, str], retry: bool = False
) -> list[Task]:
    """What is left to do, first things first: what was never run, then by rung, then by priority, then by seed.

    An arm that is infeasible in one run is left out: seeds, rates and epochs do not change its memory. Rows of other
    sources choose learning rates like all others, until they are run again, last: a table would never fill otherwise.

    Args:
        arms: every arm.
        rows: what was run, by :attr:`Task.key`.
        digests: of the sources of each arm, by :attr:`Arm.sources`.
        retry: run again also what failed.
    """
    found: list[tuple[tuple[Any, ...], Task]] = []
    every = list(arms)
    for index, arm in enumerate(every):
        digest = digests[arm.sources]
        group = [each for each in every if each.group and (each.experiment, each.group) == (arm.experiment, arm.group)]
        tasks = _tasks(arm, group or [arm], rows)
        if any(_infeasible(rows.get(task.key), digest) for _, task in tasks):
            continue
        for place, task in tasks:
            row = rows.get(task.key)
            stale = row is not None and row["digest"] != digest
            if row is None or stale or (retry and failed(row)):
                rank = (stale, place, arm.priority, task.seed, index, task.lr or 0.0)
                found.append((rank, replace(task, stale=stale)))
    return [task for _, task in sorted(found, key=lambda each: each[0])]


def _infeasible(row: Row | None, digest: str) -> bool:
    return row is not None and (row["exit_code"], row["digest"]) == (INFEASIBLE, digest)


def _tasks(arm: Arm, group: list[Arm], rows: Mapping[str, Row]) -> list[tuple[int, Task]]:
    """Every run of an arm of a group, with the place of its rung: the first rung of every arm has place 0.

    An arm that tunes its learning rate does so in its first rung, with one seed; its longer rungs have all seeds.
    """
    rungs, trials = rungs_of(arm), trials_of(arm, rows)
    chosen = None if choose_lr(trials, rows) is None else _shared_lr(group, rows)
    searched = int(bool(trials) and len(rungs) > 1)
    runs = [
        (0 if place == 0 else rung, Task(arm, rung, seed, chosen, provisional=bool(trials) and chosen is None))
        for place, rung in list(enumerate(rungs))[searched:]
        for seed in SEEDS
    ]
    if not trials:
        return runs
    return [*((0, trial) for trial in trials), *(run for run in runs if run[1] not in trials and _counts(run[1]))]


def _counts(task: Task) -> bool:
    """Whether a run is none of the trials that choose its learning rate, which it repeats."""
    return not (task.provisional and task.seed == SEEDS[0] and task.rung == rungs_of(task.arm)[0])


def trials_of(arm: Arm, rows: Mapping[str, Row]) -> list[Task]:
    """Runs that choose an arm's learning rate: its own rates, and one beyond while the best is the last on its side."""
    rates = sorted(arm.lrs)
    while True:
        trials = [Task(arm, rungs_of(arm)[0], SEEDS[0], rate) for rate in rates]
        best = choose_lr(trials, rows)
        if best is None or len(rates) == len(arm.lrs) + _MORE_RATES:
            return trials
        if best == rates[-1]:
            rates = [*rates, float(f"{3 * best:.1g}")]
        elif best == rates[0]:
            rates = [float(f"{best / 3:.1g}"), *rates]
        else:
            return trials


def choose_lr(trials: list[Task], rows: Mapping[str, Row]) -> float | None:
    """The learning rate of the best validation accuracy, the smallest of equals; None until all were tried."""
    scores = _scores(trials, rows)
    return max(sorted(scores), key=scores.__getitem__, default=None)


def _shared_lr(group: Iterable[Arm], rows: Mapping[str, Row]) -> float | None:
    """The learning rate of the best mean validation accuracy, of those that all arms of a group tried.

    Arms whose search has not ended do not count.
    """
    found = [scores for arm in group if (scores := _scores(trials_of(arm, rows), rows))]
    common = set.intersection(*(set(scores) for scores in found)) if found else set[float]()
    return max(sorted(common), key=lambda lr: sum(scores[lr] for scores in found), default=None)


def _scores(trials: list[Task], rows: Mapping[str, Row]) -> dict[float, float]:
    """Validation accuracy by learning rate; empty until all were tried, and -1 for a run without one."""
    tried = [(trial.lr, rows.get(trial.key)) for trial in trials]
    found = {lr: -1.0 if row["val"] is None else row["val"] for lr, row in tried if row is not None and lr is not None}
    return found if len(found) == len(trials) else {}


def failed(row: Row) -> bool:
    """Whether a run ended in a way that says nothing about its arm."""
    return row["exit_code"] not in (0, INFEASIBLE, DIVERGED)
