"""Claim: what is predicted holds from outside, and what is refused does not fit.

Random cells (model, data, budget, strategy, threads, batch, image size, precision), each in a fresh process without
kept measurements, while another process samples the private anonymous memory (RssAnon) of the one that trains. A cell
that is refused names the smallest budget: that is run too, and 3 MB less is planned, which must be refused.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from benchmarks.common import (
    DEFAULTS,
    INFEASIBLE,
    ROOT,
    Cell,
    Options,
    Settings,
    last_json,
    program,
    run_folder,
    slim,
    smallest_named,
    stop,
    to_flags,
)
from benchmarks.store import ResultFile, finish, markdown, mb

MODELS = (
    "smallconv", "smallconvl", "vgg8", "vgg11", "resnet18", "mobilenet_v2", "benchmarks.small_networks:group_norms",
    "benchmarks.small_networks:squeezing",
)  # fmt: skip
DATA = (("cifar10", 32), ("folder:flower_photos", 32), ("folder:flower_photos", 64), ("folder:hymenoptera", 96))
STRATEGIES = ("auto", "backprop", "checkpoint", "blockwise", "elastic")
SAMPLE_SECONDS = 0.002
SLACK_BYTES = 500_000
"""How far memory at rest differs between the process that trains and the one that tells the baseline."""
LESS_BYTES = 3_000_000
"""By how much less than the smallest budget that is named must not do."""
BASELINE = "import sys; import snugfit._cli.worker, snugfit._api as api; from snugfit.memory import read_status; " \
    "api.prepare_process(int(sys.argv[1])); print(read_status().anon)"  # fmt: skip

app = program("budget_truth")


@app.default
def main(*, cells: int = 60, seed: int = 16, options: Options = DEFAULTS) -> None:
    """Run every cell that the result file does not have.

    Args:
        cells: how many are drawn.
        seed: of the draw.
        options: time limit and folders; threads and batch size are drawn.
    """
    results = ResultFile("budget_truth", options)
    baselines = {threads: baseline(threads) for threads in (1, 2)}
    for index in range(cells):
        settings = drawn(seed, index)
        cell = _once(results, settings, options, baselines, index, "drawn")
        named = smallest_named(cell)
        if cell.get("exit_code") == INFEASIBLE and named is not None:
            _once(results, {**settings, "memory": named}, options, baselines, index, "named")
            _once(results, {**settings, "memory": named - LESS_BYTES}, options, baselines, index, "less")
    finish(results, render)


def drawn(seed: int, index: int) -> Settings:
    """Settings of a cell; each depends on the seed and its own number alone."""
    draw = random.Random(f"{seed}/{index}")
    data, size = draw.choice(DATA)
    batch = draw.choice((4, 8, 24, 32, 100))
    return {
        "model": draw.choice(MODELS), "data": data, "image_size": size, "strategy": draw.choice(STRATEGIES),
        "memory": f"{draw.randint(30, 160)}MB", "batch_size": batch, "threads": draw.choice((1, 2)),
        "precision": draw.choice(("float32", "float32", "bfloat16")), "optimizer": draw.choice(("sgd", "adamw")),
        "epochs": 1, "max_train": 3 * batch, "max_val": 16, "profile_cache": "off",
    }  # fmt: skip


def _once(
    results: ResultFile, settings: Settings, options: Options, baselines: dict[int, int], index: int, kind: str
) -> Cell:
    command = " ".join(["snugfit", "plan" if kind == "less" else "train", *to_flags(settings)])

    def work() -> Cell:
        cell = observed(command.split(), settings, options, baselines[settings["threads"]])
        return {**cell, "verdict": verdict(kind, cell)}

    return results.once(command, work, index=index, kind=kind)


def baseline(threads: int) -> int:
    """RssAnon in bytes of a process that has done what a run does before it counts."""
    command = [sys.executable, "-c", BASELINE, str(threads)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)


def observed(command: list[str], settings: Settings, options: Options, at_rest: int) -> Cell:
    """Run a command and sample the memory of the processes below it.

    Returns:
        ``exit_code``, ``seconds``, ``observed_bytes`` (the highest sample above ``at_rest`` once the plan is written),
        ``planning_bytes`` (the highest before, which the budget bounds and no prediction tells), and ``record`` or
        ``error``.
    """
    folder = run_folder(settings, options)
    shutil.rmtree(folder, ignore_errors=True)
    out = ["--out", str(folder)] if command[1] == "train" else []
    environment = {**os.environ, **({"SNUGFIT_DATA": options.data_dir} if options.data_dir else {})}
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", *command, *out, "--json", "--quiet"], stdout=subprocess.PIPE, env=environment, cwd=ROOT,
        text=True,
    )  # fmt: skip
    observer = _Observer(process.pid, folder / "plan.json")
    observer.start()
    try:
        text, _ = process.communicate(timeout=options.timeout)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        text, code = stop(process), None
    observer.ended.set()
    observer.join()
    shutil.rmtree(folder, ignore_errors=True)
    output = last_json(text)
    trained = "run_dir" in output
    told: Cell = {"error": output["error"]} if "error" in output else {"record": slim(output)} if trained else {}
    return {
        "exit_code": code, "seconds": round(time.perf_counter() - started, 1),
        "observed_bytes": observer.highest(at_rest, planned=True) if trained else None,
        "planning_bytes": observer.highest(at_rest, planned=False) if trained else None, **told,
    }  # fmt: skip


class _Observer(threading.Thread):
    """Samples RssAnon of every process below one; the last that appears is the one that trains.

    Args:
        pid: of the command.
        plan: file that is written between planning and training.
    """

    def __init__(self, pid: int, plan: Path) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self._parent, self._plan = psutil.Process(pid), plan
        self._peaks: dict[bool, dict[int, int]] = {False: {}, True: {}}

    def run(self) -> None:
        """Sample until told to end."""
        children: list[int] = []
        for turn in range(10**9):
            if self.ended.wait(SAMPLE_SECONDS):
                return
            if turn % 50 == 0:
                children = _below(self._parent)
            peaks = self._peaks[self._plan.exists()]
            for pid in children:
                anon = _anon(pid)
                if anon is not None:
                    peaks[pid] = max(peaks.get(pid, 0), anon)

    def highest(self, at_rest: int, *, planned: bool) -> int | None:
        """The highest sample above ``at_rest`` of the last process that appeared; None where there is none.

        Args:
            at_rest: bytes of a process at rest.
            planned: of samples taken once the plan was written, or of those before.
        """
        peaks = list(self._peaks[planned].values())
        return max(peaks[-1] - at_rest, 0) if peaks else None


def _below(parent: psutil.Process) -> list[int]:
    try:
        return [child.pid for child in parent.children() if "snugfit._cli.worker" in child.cmdline()]
    except psutil.Error:
        return []


def _anon(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon:")), None)


def verdict(kind: str, cell: Cell) -> list[str]:
    """What is wrong with a cell: nothing, where all promises were kept.

    Args:
        kind: ``drawn``, ``named`` (the smallest budget that an error named) or ``less`` than that.
        cell: what was found.
    """
    code = cell["exit_code"]
    if kind == "less":
        return [] if code == INFEASIBLE else [f"less than the smallest budget does: exit {code}"]
    if code == INFEASIBLE:
        lacks_memory = (
            cell.get("error", {}).get("type") != "InfeasibleTimeError"
        )  # elastic may find no update that helps
        return ["the budget named is refused"] if kind == "named" and lacks_memory else []
    if code != 0:
        return [f"exit {code}"]
    return _excesses(cell)


def _excesses(cell: Cell) -> list[str]:
    record = cell["record"]
    predicted, budget = record["predicted"]["peak_bytes"], record["budget"]["memory_bytes"]
    figures = {"measured": record["measured"]["peak_bytes"], "observed": (cell["observed_bytes"] or 0) - SLACK_BYTES}
    found = [
        f"{name} {mb(figure)} MB above {of} {mb(bound)}"
        for name, figure in figures.items()
        for of, bound in (("prediction", predicted), ("budget", budget))
        if figure > bound
    ]
    planning = (cell.get("planning_bytes") or 0) - SLACK_BYTES
    if planning > budget:
        found.append(f"planning {mb(planning)} MB above budget {mb(budget)}")
    for phase in record["phases"]:
        measured, expected = phase["measured_peak_bytes"], phase["predicted_peak_bytes"]
        if measured > expected:
            found.append(f"phase {phase['name']}: measured {mb(measured)} MB above prediction {mb(expected)}")
    return found


def render(cells: list[Cell]) -> str:
    """Counts, and a row per run and per failure."""
    ran = [cell for cell in cells if cell.get("record", {}).get("measured")]
    wrong = [cell for cell in cells if cell["verdict"]]
    refused = [cell for cell in cells if cell["kind"] == "drawn" and cell["exit_code"] == INFEASIBLE]
    rows = [
        [cell["kind"], cell["command"].removeprefix("snugfit "), _figures(cell), "; ".join(cell["verdict"]) or "kept"]
        for cell in cells
    ]
    counts = f"{len(cells)} cells, {len(ran)} trained, {len(refused)} refused at first, {len(wrong)} with a failure"
    return f"{counts}\n\n" + markdown(["kind", "command", "observed / measured / predicted, MB", "verdict"], rows)


def _figures(cell: Cell) -> str:
    record = cell.get("record", {})
    if not record.get("measured"):
        return json.dumps(cell["exit_code"])
    figures = (cell["observed_bytes"], record["measured"]["peak_bytes"], record["predicted"]["peak_bytes"])
    return " / ".join(map(mb, figures))


if __name__ == "__main__":
    app()
