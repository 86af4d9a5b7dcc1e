"""Claim: whatever happens to a run, it ends with the uninterrupted weights or with the documented exit code.

Every strategy on small images, with faults at random moments (:mod:`benchmarks.soak_faults`). After every trial no
process may live on, and no file be left that an uninterrupted run does not leave. Trials are drawn from a seed, and the
same trial meets the same fault; the moment within the run is a time, so that what it hits may differ.
"""

from __future__ import annotations

import csv
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.common import DEFAULTS, Cell, Options, Settings, program
from benchmarks.soak_faults import FAULTS, Reference, Trial
from benchmarks.soak_runs import Hung, Place, leftovers, names_in, orphans, start, weights_of
from benchmarks.store import ResultFile, finish, markdown, note

_SHARED: Settings = {
    "model": "tiny_nets:cnn", "image_size": 16, "max_train": 300, "max_val": 60, "batch_size": 32, "epochs": 3,
    "memory": "80MB", "threads": 1,
}  # fmt: skip
_UNITS: Settings = {"strategy": "blockwise", "module_units": "1"}
RECIPES: dict[str, Settings] = {
    "backprop": {"strategy": "backprop"},
    "checkpoint": {"strategy": "checkpoint", "optimizer": "schedulefree"},
    "blockwise": {"strategy": "blockwise", "block_units": 1},
    "blockwise, views": _UNITS | {"rho": 0.2, "optimizer": "adamw", "cache_dtype": "uint8", "views": 2},
    "lls-mxm": {"strategy": "blockwise", "local_loss": "lls-mxm", "optimizer": "schedulefree", "block_units": 2},
    "elastic": {"strategy": "elastic", "time_ratio": 0.9, "interval": 1},
    "prunetrain": {"strategy": "elastic", "scheme": "prunetrain", "interval": 1, "lasso": 0.9},
    "rep-net": {"strategy": "sidenet", "image_size": 32},
    "rep-net, pruned": {"strategy": "sidenet", "image_size": 32, "prune": "on", "weight_storage": "int8"},
    "tiled": {"strategy": "tiled", "tiles": "2x2"},
    "tiled, scratch": {"strategy": "tiled", "tiles": "2x2", "scratch": "on"},
    "pepita": {"strategy": "feedback", "feedback_rule": "pepita", "optimizer": "adamw"},
}
LONG_EPOCHS = 300
GROWTH_BYTES = 2_000_000
"""What a run of 300 epochs may measure above the peak of its first tenth."""

app = program("soak")


@app.default
def main(
    *,
    minutes: float = 60.0,
    trials: int | None = None,
    seed: int = 0,
    recipes: tuple[str, ...] = tuple(RECIPES),
    faults: tuple[str, ...] = tuple(FAULTS),
    growth: bool = False,
    options: Options = DEFAULTS,
) -> int:
    """Disturb runs until the time is over; exits with 1 where something should not have been.

    A trial that failed is run again where the command is repeated at another commit.

    For example: python -m benchmarks.soak --minutes 60 --seed 3 --data mnist

    Args:
        minutes: how long.
        trials: most trials; any number by default.
        seed: of the trials.
        recipes: which of the runs.
        faults: which of the faults.
        growth: first train every strategy for 300 epochs, and see that its memory does not grow.
        options: what every benchmark takes; the batch size is not used.
    """
    results = ResultFile("soak", options, failed)
    data = {"data": options.data if options.data != DEFAULTS.data else "digits"}
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(dir=options.work, prefix="soak-") as name:
        soak = Soak(Place(Path(name), options.data_dir), data, seed)
        if growth:
            for recipe in recipes:
                results.once(f"{recipe}, 300 epochs, {data['data']}", lambda r=recipe: soak.long(r), fault="300 epochs")  # type: ignore[misc]
        for number in range(trials if trials is not None else 10**9):
            if time.monotonic() > deadline:
                break
            recipe, fault = soak.drawn(number, recipes, faults)
            label = f"{recipe}, {fault}, {data['data']}, seed {seed}, trial {number}"
            results.once(label, lambda a=recipe, b=fault, n=number: soak.trial(a, b, n), fault=fault)  # type: ignore[misc]
    finish(results, render)
    return int(any(failed(cell) for cell in results.cells))


def failed(cell: Cell) -> bool:
    """Whether something was in a trial that should not have been."""
    return bool(cell["failures"])


class Soak:
    """Trials in one folder, against uninterrupted runs that are made when they are first needed."""

    def __init__(self, place: Place, shared: Settings, seed: int) -> None:
        self.place, self.shared, self.seed = place, shared, seed
        self._references: dict[str, Reference] = {}

    def drawn(self, number: int, recipes: Iterable[str], faults: Iterable[str]) -> tuple[str, str]:
        """Recipe and fault of a trial."""
        draw = random.Random(f"{self.seed} {number}")
        return draw.choice(list(recipes)), draw.choice(list(faults))

    def trial(self, recipe: str, fault: str, number: int) -> Cell:
        """Disturb a run, and tell what went wrong."""
        reference = self.reference(recipe)
        run = self.place.folder / "run"
        trial = Trial(self.place, reference, run, random.Random(f"{self.seed} {number} {recipe} {fault}"))
        self._watched(trial.failures, lambda: FAULTS[fault](trial))
        if trial.finished:
            trial.failures += leftovers(self.place, run, reference.names)
        for folder in (run, self.place.temporary):
            shutil.rmtree(folder, ignore_errors=True)
        for failure in trial.failures:
            note(f"         FAILED: {failure}")
        return {"recipe": recipe, "did": trial.did, "codes": trial.codes, "failures": self._private(trial.failures)}

    def long(self, recipe: str) -> Cell:
        """Train for 300 epochs, and compare the peaks of the first tenth and of the whole."""
        run, failures = self.place.folder / "run", list[str]()
        settings = {**self._settings(recipe), "epochs": LONG_EPOCHS, "max_train": 64}
        peaks: list[int] = []

        def work() -> None:
            command = start(self.place, settings, run)
            if command.ends() != 0:
                failures.append(f"exit code {command.process.returncode}: {command.said[-300:]}")
                return
            peaks.extend(current_bytes(run))

        self._watched(failures, work)
        shutil.rmtree(run, ignore_errors=True)
        early, late = (max(part, default=0) for part in (peaks[: len(peaks) // 10], peaks))
        if late > early + GROWTH_BYTES:
            failures.append(f"memory grew from {early} to {late} bytes")
        return {"recipe": recipe, "did": [f"{early} to {late} bytes"], "codes": [], "failures": self._private(failures)}

    def reference(self, recipe: str) -> Reference:
        """The uninterrupted run of a recipe."""
        if recipe not in self._references:
            run = self.place.folder / f"reference-{len(self._references)}"
            settings = self._settings(recipe)
            started = time.monotonic()
            command = start(self.place, settings, run)
            if command.ends() != 0:
                raise RuntimeError(f"{recipe} does not run at all: {command.said[-500:]}")
            seconds, peak = time.monotonic() - started, command.output["measured"]["peak_bytes"]  # type: ignore[index]
            self._references[recipe] = Reference(settings, run, weights_of(run), names_in(run), seconds, peak)
        return self._references[recipe]

    def _settings(self, recipe: str) -> Settings:
        return {**_SHARED, **self.shared, **RECIPES[recipe]}

    def _watched(self, failures: list[str], work: Callable[[], None]) -> None:
        """Do something, and then look for processes that outlived it."""
        try:
            work()
        except Hung as error:
            failures.append(str(error))
        alive = orphans(self.place)
        if alive:
            failures.append(f"{len(alive)} processes live on")

    def _private(self, failures: list[str]) -> list[str]:
        return [failure.replace(str(self.place.folder), "WORK") for failure in failures]


def current_bytes(run: Path) -> list[int]:
    """Bytes in use at each step that a run folder tells of."""
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    return [int(float(row["current_bytes"])) for row in rows if row.get("current_bytes")]


def render(cells: list[Cell]) -> str:
    """A row per fault, a column per strategy: trials, and failures where there were any; then the failures."""
    faults = list(dict.fromkeys(cell["fault"] for cell in cells))
    recipes = [recipe for recipe in RECIPES if any(cell["recipe"] == recipe for cell in cells)]
    rows = [
        [fault, *(_count([c for c in cells if (c["fault"], c["recipe"]) == (fault, recipe)]) for recipe in recipes),
         _count([c for c in cells if c["fault"] == fault])]
        for fault in faults
    ]  # fmt: skip
    total = ["all", *(_count([c for c in cells if c["recipe"] == recipe]) for recipe in recipes), _count(cells)]
    broken = [f"- {cell['command']} ({'; '.join(cell['did'])}): {'; '.join(cell['failures'])}" for cell in cells
              if cell["failures"]]  # fmt: skip
    table = markdown(("fault", *recipes, "all"), [*rows, total])
    return "\n\n".join([table, "Failures:\n\n" + "\n".join(broken) if broken else "No failures."])


def _count(cells: list[Cell]) -> str:
    broken = sum(bool(cell["failures"]) for cell in cells)
    return f"{len(cells)}, {broken} failed" if broken else str(len(cells)) if cells else "-"


if __name__ == "__main__":
    raise SystemExit(app())
