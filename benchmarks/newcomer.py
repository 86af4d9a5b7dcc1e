"""Claim: networks that no one here wrote are planned, trained, evaluated and exported by the command line alone."""

from __future__ import annotations

import shutil

from benchmarks.common import DEFAULTS, Cell, Options, Settings, program, run, run_folder, to_flags
from benchmarks.store import ResultFile, finish, markdown, mb, note

MODELS = ("timm:resnet26", "timm:efficientnet_lite0", "torchvision:shufflenet_v2_x1_0")
STEPS = ("plan", "train", "evaluate", "export")

app = program("newcomer")


@app.default
def main(
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
    """One row for each network."""
    header = ("network", "budget", "strategy", "predicted / measured peak (MB)", *STEPS)
    return markdown(header, [_row(cell) for cell in cells if cell["arm"] == "newcomer"])


def _row(cell: Cell) -> list[str]:
    steps, settings = cell["steps"], cell["settings"]
    told = steps.get("train", {}).get("told", {})
    peaks = f"{mb(told.get('predicted'))} / {mb(told.get('measured'))}"
    strategy = told.get("strategy", "-")
    return [settings["model"], settings["memory"], strategy, peaks, *(_outcome(steps.get(s)) for s in STEPS)]


def _outcome(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell["exit_code"] == 0:
        return f"{cell['seconds']:.0f} s"
    return f"exit {cell['exit_code']}: {cell.get('error', {}).get('message', '')}".replace("|", "/")


if __name__ == "__main__":
    app()
