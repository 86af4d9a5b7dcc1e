"""Claim: a newcomer has a good model within minutes, and networks that no one here wrote need no code."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.common import DEFAULTS, ROOT, Cell, Options, Settings, last_json, program, run, run_folder, to_flags
from benchmarks.store import ResultFile, finish, markdown, mb, note, percent

MODELS = ("timm:resnet26", "timm:efficientnet_lite0", "torchvision:shufflenet_v2_x1_0")
STEPS = ("plan", "train", "evaluate", "export")
_INSTALLATION = "README's installation"
_DIGITS = "--model vgg16 --data digits --memory 100MB --epochs 1 --batch-size 16 --saturation-stop"
_PHOTOS = "--model mobilenet_v2 --data folder:flower_photos --max-train 300 --memory 150MB"
PATHS = {
    _INSTALLATION: "",
    "README's first command, installed": _DIGITS,
    "photos: the README's recipe": f"{_PHOTOS} --image-size 96",
    "photos: its former recipe": f"{_PHOTOS} --image-size 64 --batch-size 32 --epochs 5",
    "a module of one's own": "own_module.py",
    "a Lightning loop": "lightning_with_budget.py",
}
"""Flags of ``snugfit train``, or a script of ``examples/``; nothing for the installation."""

app = program("newcomer")


@app.command
def paths(
    *,
    names: tuple[str, ...] = tuple(PATHS),
    weights: str | None = None,
    seeds: int = 1,
    source: Path = ROOT,
    python: str = sys.executable,
    options: Options = DEFAULTS,
) -> None:
    """Time the first things that a newcomer does, from the command to the model, each in a fresh process.

    Args:
        names: which of them.
        weights: ImageNet weights of MobileNetV2, which the recipe needs.
        seeds: how often, with other seeds of training; examples have their own, and the installation has none.
        source: checkout whose ``src`` and ``examples`` are used.
        python: interpreter, such as that of an environment with Lightning.
        options: what every benchmark takes; here the time limit and ``threads``.
    """
    results = ResultFile("newcomer", options)
    git = ["git", "rev-parse", "--short", "HEAD"]
    version = subprocess.check_output(git, cwd=source, text=True).strip()
    for name in names:
        for seed in range(seeds if PATHS[name].startswith("--") else 1):
            label = f"{name} at {version}"
            labels = {"arm": "path", "path": name, "source": version, "settings": {"threads": options.threads}}
            results.once(label, partial(_time, name, seed, weights, source, python, options), seed, **labels)
    finish(results, render)


def _time(name: str, seed: int, weights: str | None, source: Path, python: str, options: Options) -> Cell:
    """Seconds of a path and of its processors, and what it says; the memory of measurements begins empty."""
    what = PATHS[name].split()
    if not what:
        command = ["bash", "-euc", installation(source, python)]
    elif len(what) == 1:
        command = [python, str(source.resolve() / "examples" / what[0])]
    else:
        pretrained = ["--weights", weights] if weights and name == "photos: the README's recipe" else []
        command = [python, "-m", "snugfit", "train", *what, *pretrained, "--seed", str(seed), "--json", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        more = {"PYTHONPATH": str(source.resolve() / "src"), "XDG_CACHE_HOME": folder}
        more |= {"OMP_NUM_THREADS": str(options.threads)} if options.threads else {}
        load, started, before = os.getloadavg()[0], time.perf_counter(), _processor_seconds()
        done = subprocess.run(
            command, check=False, cwd=folder, env={**os.environ, **more}, capture_output=True, text=True,
            timeout=options.timeout,
        )  # fmt: skip
    output = last_json(done.stdout)
    told = {**_told(output), "accuracy": output.get("accuracy", {}).get("test")}
    return {
        "exit_code": done.returncode,
        "seconds": round(time.perf_counter() - started, 1),
        "processor_seconds": round(_processor_seconds() - before, 1),
        "load": round(load, 2),
        "told": told if output else {"lines": done.stdout.strip().splitlines()[-2:]},
        **({"error": {"message": done.stderr[-300:]}} if done.returncode else {}),
    }


def installation(source: Path, python: str) -> str:
    """The README's own command for a fresh environment, without the run at its end, for a checkout."""
    block = re.search(r"^```sh\n(.*?)\n```", (source / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1].rpartition(" && ")[0].replace("python3 ", f"{python} ").replace('".[', f'"{source.resolve()}[')


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@app.command
def networks(
    *,
    models: tuple[str, ...] = MODELS,
    memory: str = "300MB",
    image_size: int = 64,
    max_train: int = 256,
    max_val: int = 64,
    options: Options = DEFAULTS,
) -> None:
    """Take every network through all steps.

    Args:
        models: networks, by torchvision's or timm's names.
        memory: memory budget.
        image_size: side of the images in pixels, which are enlarged to it.
        max_train: training images.
        max_val: validation (and test) images.
        options: what every benchmark takes.
    """
    results = ResultFile("newcomer", options)
    for model in models:
        settings = options.settings(
            model=model, memory=memory, image_size=image_size, max_train=max_train, max_val=max_val, epochs=1,
            batch_size=32,
        )  # fmt: skip
        measure(settings, results)
    finish(results, render)


def measure(settings: Settings, results: ResultFile) -> None:
    """Run the steps one after another, up to the first that fails."""
    label = " ".join(["newcomer", *to_flags(settings)])
    results.once(label, lambda: _walk(settings, results.options), arm="newcomer", settings=settings)


def _walk(settings: Settings, options: Options) -> Cell:
    flags, folder = to_flags(settings), run_folder(settings, options)
    out = folder.with_name(folder.name + "-export")
    commands = {
        "plan": ["snugfit", "plan", *flags],
        "train": ["snugfit", "train", *flags, "--out", str(folder)],
        "evaluate": ["snugfit", "evaluate", str(folder)],
        "export": ["snugfit", "export", str(folder), "--out", str(out)],
    }
    shutil.rmtree(folder, ignore_errors=True)
    steps: dict[str, Cell] = {}
    for name, command in commands.items():
        note(f"         {name}")
        steps[name] = step = run(command, options, ["--json", "--quiet"])
        output = step.pop("output")
        step |= {"error": output["error"]} if "error" in output else {"told": _told(output)}
        if step["exit_code"] != 0:
            break
    for path in (folder, out):
        shutil.rmtree(path, ignore_errors=True)
    return {"exit_code": step["exit_code"], "seconds": sum(each["seconds"] for each in steps.values()), "steps": steps}


def _told(output: Cell) -> Cell:
    """What the table shows of a command's JSON."""
    if "measured" in output:
        return {
            "strategy": output["strategy"], "predicted": output["predicted"]["peak_bytes"],
            "measured": output["measured"]["peak_bytes"],
        }  # fmt: skip
    return {}


def render(cells: list[Cell]) -> str:
    """One row for each path at each commit, and one for each network."""
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell["arm"] == "path" and cell["exit_code"] == 0:
            rows.setdefault((cell["path"], cell["source"]), []).append(cell)
    header = ("path", "at", "runs", "processor", "clock", "load", "strategy", "test accuracy", "measured peak (MB)")
    timed = markdown(header, [_path_row(*key, found) for key, found in rows.items()]) if rows else ""
    header = ("network", "budget", "strategy", "predicted / measured peak (MB)", *STEPS)
    walked = [_row(cell) for cell in cells if cell["arm"] == "newcomer"]
    return "\n\n".join(filter(None, (timed, markdown(header, walked) if walked else "")))


def _path_row(path: str, source: str, cells: list[Cell]) -> list[str]:
    told = [cell["told"] for cell in cells]
    found = [each["accuracy"] for each in told if each.get("accuracy") is not None]
    accuracy = f"{percent(median(found))} ({percent(min(found))} - {percent(max(found))})" if found else "-"
    middle = (median(cell[key] for cell in cells) for key in ("processor_seconds", "seconds"))
    load = f"{max(cell['load'] for cell in cells):.0f}"
    strategies, peak = {each.get("strategy", "-") for each in told}, max(each.get("measured", 0) for each in told)
    seconds = [f"{each:.0f} s" for each in middle]
    return [path, source, str(len(cells)), *seconds, load, ", ".join(sorted(strategies)), accuracy, mb(peak or None)]


def _row(cell: Cell) -> list[str]:
    steps, settings = cell["steps"], cell["settings"]
    told = steps.get("train", {}).get("told", {})
    peaks = f"{mb(told.get('predicted'))} / {mb(told.get('measured'))}"
    strategy = told.get("strategy", "-")
    model = settings["model"] + (f", {settings['image_size']} pixels" if "image_size" in settings else "")
    return [model, settings["memory"], strategy, peaks, *(_outcome(steps.get(s)) for s in STEPS)]


def _outcome(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell["exit_code"] == 0:
        return f"{cell['seconds']:.0f} s"
    return f"exit {cell['exit_code']}: {cell.get('error', {}).get('message', '')}".replace("|", "/")


if __name__ == "__main__":
    app()
