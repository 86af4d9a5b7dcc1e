"""Claim: at an enforced memory cap snugfit trains where its peers fail, and is no slower where they do not.

Each peer is a short training script as its users would write it, in a process of its own under the same enforced cap:
plain PyTorch, micro-batches found by halving, ``checkpoint_sequential``, Lightning's and accelerate's batch finders,
and ``torch.compile`` with ``activation_memory_budget``. All train the same network on the same images for the same
time, search included, and are tested then. ``--python`` names an interpreter that has Lightning and accelerate beside
snugfit: what is not installed is left out, and said so.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from math import ceil

from benchmarks.common import DEFAULTS, INFEASIBLE, Cell, Options, Settings, alternate, program, run, to_flags
from benchmarks.common import train as snugfit_train
from benchmarks.peers_tables import render
from benchmarks.planner import cache_flags, work_folder
from benchmarks.planner_tables import slim_record
from benchmarks.store import ResultFile, finish, note

PEERS = (
    "plain", "micro", "checkpoint", "lightning", "accelerate", "compile-1.0", "compile-0.5", "compile-0.2",
)  # fmt: skip
OURS = ("snugfit-exact", "snugfit")
SUBJECTS = ("vgg16:250MB", "resnet18:200MB", "resnet18:100MB")
PLANNED_EPOCHS = 10
"""Epochs of a plan: of a single one, measuring another schedule would take longer than it saves."""
MARGIN = 0.95
"""Share of the time that is left that a run's predicted seconds may fill."""

UNUSABLE = 4

app = program("peers")


@app.default
def main(
    *,
    subjects: tuple[str, ...] = SUBJECTS,
    ways: tuple[str, ...] = (*OURS, *PEERS),
    seconds: float = 120.0,
    max_train: int = 2560,
    max_val: int = 500,
    image_size: int | None = None,
    batch: int = 64,
    lr: float = 0.05,
    keep_freed: bool = False,
    repeats: int = 1,
    python: str = sys.executable,
    lane: str = "0/1",
    options: Options = DEFAULTS,
) -> None:
    """Train by every way at every cap for the same time.

    For example: python -m benchmarks.peers --python peers/bin/python --threads 1

    Args:
        subjects: models and memory caps.
        ways: peers, and snugfit's two.
        seconds: time of each, search included.
        max_train: training images.
        max_val: validation images, and test images.
        image_size: side of the images; the data set's own by default.
        batch: images per optimizer step, which what does not fit is accumulated to.
        lr: learning rate, constant.
        keep_freed: whether the heap of peers keeps freed memory, as glibc does by default, which is faster and takes
            more; otherwise it gives it back at once.
        repeats: times that everything is done, forwards and backwards in turn.
        python: interpreter of the peers.
        lane: which part of the work to do, like 0/2 for the first of two parts.
        options: what every benchmark takes.
    """
    results, (number, _, count) = ResultFile("peers", options), lane.partition("/")
    cells = [(subject, way) for subject in subjects for way in ways]
    for repeat, (subject, way) in alternate(cells[int(number) :: int(count)], repeats):
        model, _, memory = subject.partition(":")
        settings = options.settings(
            model=model, memory=memory, max_train=max_train, max_val=max_val, image_size=image_size, batch_size=batch,
            lr=lr,
        )  # fmt: skip
        if way in OURS:
            label = " ".join([way, "--seconds", str(seconds), *to_flags(settings)])
            labels = {"arm": "peer", "way": way, "settings": settings, "time": seconds}
            results.once(label, _ours(settings, way, seconds, options), repeat, **labels)
        else:
            peer(results, {**settings, "keep_freed": True} if keep_freed else settings, way, seconds, python, repeat)
    finish(results, render)


def peer(
    results: ResultFile, settings: Settings, way: str, seconds: float, python: str, repeat: int = 0
) -> Cell:  # fmt: skip
    """The stored or new cell of one peer in a process of its own.

    Args:
        results: where it is kept.
        settings: flags of ``benchmarks.peers_run``.
        way: which peer.
        seconds: its time, search included.
        python: interpreter that has its packages.
        repeat: number of the repetition.
    """
    module = ["benchmarks.peers_run", "--way", way, "--seconds", str(seconds), *to_flags(settings)]

    def measured() -> Cell:
        cell = run(module, results.options, interpreter=python)
        outcome = cell.pop("output")
        if "missing" in outcome:
            note(f"         {way} is left out: {outcome['missing']} is not installed in the interpreter of --python")
            cell["exit_code"] = UNUSABLE
        return {**cell, "outcome": outcome or {"failure": f"ended with code {cell['exit_code']}"}}

    command = " ".join(["python", "-m", *module])
    return results.once(command, measured, repeat, arm="peer", way=way, settings=settings, time=seconds)


def _ours(settings: Settings, way: str, seconds: float, options: Options) -> Callable[[], Cell]:
    """What plans, trains for as many images as are predicted to take the time that is left, and tests."""

    def measured() -> Cell:
        wanted = {**settings, "schedule": "constant"}
        folder = work_folder(options) / "-".join(["peers", way, settings["model"], settings["memory"]])
        shutil.rmtree(folder, ignore_errors=True)  # the search is to be counted
        extra = cache_flags(folder)
        planned = _plan({**wanted, "strategy": "exact" if way == "snugfit-exact" else "auto"}, options, extra)
        spent, best = planned["seconds"], choose(planned["candidates"])
        if best is None:
            outcome = {"refused": True, "failure": "said before anything ran", "used_seconds": spent}
            return {"exit_code": INFEASIBLE, "seconds": spent, "outcome": outcome}
        epoch_seconds, left = best["predicted"]["seconds_per_epoch"], (seconds - spent) * MARGIN
        epochs, images = passes(left, epoch_seconds, settings["max_train"], settings["batch_size"])
        wanted |= {"strategy": best["strategy"], "epochs": epochs, "max_train": images}
        cell = snugfit_train(wanted, options, extra=extra)
        return {**cell, **_told(cell, spent, settings, epochs * images)}

    return measured


def _plan(settings: Settings, options: Options, extra: list[str]) -> Cell:
    flags = [*to_flags(settings), "--epochs", str(PLANNED_EPOCHS)]
    cell = run(["snugfit", "plan", *flags, "--json", "--quiet"], options, extra)
    return {"seconds": cell["seconds"], "candidates": cell["output"].get("candidates", [])}


def choose(candidates: list[Cell]) -> Cell | None:
    """What fits and takes the least time in all."""
    fitting = [each for each in candidates if each["feasible"]]
    return min(fitting, key=lambda each: float(each["predicted"]["seconds"]), default=None)


def passes(seconds: float, epoch_seconds: float, images: int, batch: int) -> tuple[int, int]:
    """Epochs, and images in each, in whole batches, that together fill a time.

    Args:
        seconds: the time.
        epoch_seconds: of one epoch over all images.
        images: how many there are.
        batch: images of a batch.
    """
    epochs = max(ceil(seconds / epoch_seconds), 1)
    return epochs, max(int(images * seconds / epoch_seconds / epochs) // batch, 1) * batch


def _told(cell: Cell, spent: float, settings: Settings, images: int) -> Cell:
    """The outcome of a run of these settings on ``images`` in all, in the words of the peers' cells."""
    if "record" not in cell:
        return {"outcome": {"failure": cell.get("error", {}).get("message", f"exit {cell['exit_code']}")}}
    record = slim_record(cell["record"])
    training = sum(phase["seconds"] for phase in record["phases"] if phase["steps"])
    step_images = images / cell["steps"]  # fewer than a batch where accumulated gradients have no room
    cap, peak = record["budget"]["memory_bytes"], record["measured"]["peak_bytes"]
    outcome = {
        "accuracy": record["accuracy"]["test"], "refused": False, "failure": None, "images": images,
        "seconds_per_epoch": training / images * settings["max_train"],
        "step_seconds": cell["step_seconds"] / step_images * settings["batch_size"],
        "used_seconds": spent + record["measured"]["seconds"], "search_seconds": spent,
        "peak_bytes": peak, "cap_bytes": cap, "within": peak <= cap, "strategy": record["strategy"],
    }  # fmt: skip
    return {"record": record, "outcome": outcome}


if __name__ == "__main__":
    app()
