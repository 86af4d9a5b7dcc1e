"""Claim: networks train exactly, nearly exactly and locally in less memory with snugfit than by other ways.

For snugfit, a floor is the smallest budget that the error of a hopeless budget names, and that a run keeps to. For
other ways it is the smallest cap, enforced as snugfit's, in which two optimizer steps and a test pass, by bisection.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.budgets import measure
from benchmarks.common import DEFAULTS, Cell, Options, Settings, program, smallest_named
from benchmarks.peers import peer
from benchmarks.store import ResultFile, finish, markdown, mb, succeeded

ARMS: dict[str, tuple[str, Settings]] = {
    "backprop": ("exact", {"strategy": "backprop", "optimizer_state": "float32"}),
    "checkpoint": ("exact", {"strategy": "checkpoint", "optimizer_state": "float32"}),
    "checkpoint, paged": ("exact", {"strategy": "checkpoint", "optimizer_state": "float32", "activations": "paged"}),
    "backprop, int8 state": ("nearly exact", {"strategy": "backprop", "optimizer_state": "int8"}),
    "backprop, int8 state, bfloat16 weights, int4 activations": (
        "nearly exact",
        {"strategy": "backprop", "optimizer_state": "int8", "weight_dtype": "bfloat16", "activations": "int4"},
    ),
    "checkpoint, int8 state, bfloat16 weights": (
        "nearly exact", {"strategy": "checkpoint", "optimizer_state": "int8", "weight_dtype": "bfloat16"},
    ),
    "blockwise": ("local", {"strategy": "blockwise", "module_units": "1", "optimizer_state": "float32"}),
    "blockwise, int8 state": ("local", {"strategy": "blockwise", "module_units": "1", "optimizer_state": "int8"}),
}  # fmt: skip
PEERS = {
    "plain:16": "plain PyTorch",
    "plain:2": "plain PyTorch",
    "checkpoint:2": "checkpoint_sequential",
    "compile-0.2:2": "torch.compile, activation_memory_budget 0.2",
    "bitsandbytes:2": "plain PyTorch, momentum in 8 bits by bitsandbytes",
}
"""Ways of ``benchmarks.peers_run``, with the images of an optimizer step."""

HOPELESS = {"growth": {"memory": "10MB"}, "total": {"total_memory": "150MB"}}
MEASURED = ("predicted", "measured")
KINDS = ("strategy", "optimizer_state", "weight_dtype", "activations")
"""What tells arms apart."""

AMPLE_MB, STEPS, SEARCH_SECONDS = 6000, 2, 600.0
Key = tuple[str, int | None]

app = program("floors")


@app.default
def main(
    *,
    models: tuple[str, ...] = ("vgg16", "vgg19", "resnet18", "resnet50:224", "mobilenet_v2:224"),
    arms: tuple[str, ...] = tuple(ARMS),
    budgets: tuple[str, ...] = tuple(HOPELESS),
    peers: tuple[str, ...] = tuple(PEERS),
    max_train: int = 32,
    max_val: int = 16,
    python: str = sys.executable,
    options: Options = DEFAULTS,
) -> None:
    """Find the smallest memory in which each model trains.

    For example: python -m benchmarks.floors --batch-size 16 --threads 1 --python peers/bin/python

    Args:
        models: models, each with the side of its images in pixels where it is not the data set's own.
        arms: snugfit's ways; none leaves them out.
        budgets: growth, the memory that a run adds, and total, the memory of all its processes.
        peers: other ways with the images of an optimizer step; none leaves them out.
        max_train: training images.
        max_val: validation (and test) images.
        python: interpreter of the peers.
        options: what every benchmark takes.
    """
    results = ResultFile("floors", options)
    for model in models:
        name, _, pixels = model.partition(":")
        shared = options.settings(model=name, image_size=int(pixels) if pixels else None)
        images = {"max_train": max_train, "max_val": max_val}
        for arm in arms if "none" not in arms else ():
            for budget in budgets:
                measure({**shared, **ARMS[arm][1], **HOPELESS[budget], **images, "epochs": 1}, results)
        for way in peers if "none" not in peers else ():
            _search(results, {**shared, **images}, way, python)
    finish(results, render)


def _search(results: ResultFile, settings: Settings, way: str, python: str) -> None:
    """Bisect the cap of one peer; every try is a cell."""
    name, _, images = way.partition(":")

    def trains(cap_mb: int) -> int | None:
        flags = {**settings, "batch_size": int(images), "memory": f"{cap_mb}MB", "steps": STEPS}
        cell = peer(results, flags, name, SEARCH_SECONDS, python)
        return int(cell["outcome"]["peak_bytes"]) if trained(cell) else None

    peak = trains(AMPLE_MB)
    if peak is not None:
        bisect(lambda cap: trains(cap) is not None, guess=-(-peak // 10**6))


def trained(cell: Cell) -> bool:
    """Whether a peer trained and stayed within its cap."""
    outcome = cell["outcome"]
    return outcome.get("failure") is None and bool(outcome.get("within"))


def bisect(fits: Callable[[int], bool], guess: int) -> int:
    """The smallest number that fits, to 1 or 2 %, whichever is more; if one fits, all larger ones do.

    From ``guess`` it goes down while numbers fit, or up while they do not, in steps that double; then it halves.

    Args:
        fits: whether a positive number fits; called once for each.
        guess: where to begin.
    """
    low, high, cap, step = 0, None, guess, resolution(guess)
    while high is None or high - low > resolution(high):
        if fits(cap):
            high = cap
        else:
            low = cap
        if high is None:
            cap, step = low + step, 2 * step
        elif low == 0:
            cap, step = max(high - step, 1), 2 * step
        else:
            cap = (low + high) // 2
    return high


def resolution(value: int) -> int:
    """How near a floor is to be found."""
    return max(1, value // 50)


def render(cells: list[Cell]) -> str:
    """A table for each model, and the sentences on how they compare."""
    ours = [cell for cell in cells if "way" not in cell]
    theirs = [cell for cell in cells if "way" in cell]
    keys = list(dict.fromkeys(map(_key, [*ours, *theirs])))
    parts = []
    for key in keys:
        own, others = ([each for each in some if _key(each) == key] for some in (ours, theirs))
        pixels = f" at {key[1]} pixels" if key[1] else ""
        header = (
            "way", "gradients", "images at once", "smallest growth (MB)", "before (MB)",
            "predicted, measured in it (MB)", "smallest total (MB)", "measured in it (MB)",
        )  # fmt: skip
        rows = [_our_row(arm, own) for arm in ARMS] + [_peer_row(way, others) for way in PEERS]
        measured = [row for row in rows if set(row[3:]) - {"not measured", "-"}]
        missing = [row[0] + (f" with {row[2]} images" if row[2] != "-" else "") for row in rows if row not in measured]
        parts.append(f"**{key[0]}{pixels}**\n\n{markdown(header, measured)}")
        parts += [f"Not measured: {'; '.join(missing)}."] if missing else []
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in conclusions(cells))])


def _key(cell: Cell) -> Key:
    return cell["settings"]["model"], cell["settings"].get("image_size")


def _of_arm(arm: str, cells: list[Cell], budget: str) -> list[Cell]:
    """Cells of an arm with one kind of budget."""
    wanted, flag = ARMS[arm][1], next(iter(HOPELESS[budget]))
    same = [cell for cell in cells if all(cell["settings"].get(kind) == wanted.get(kind) for kind in KINDS)]
    return [cell for cell in same if flag in cell["settings"]]


def _before(arm: str, cells: list[Cell]) -> str:
    """The floor of ``benchmarks.budgets`` at a commit at which optimizer state had no option."""
    older = [cell for cell in cells if "optimizer_state" not in cell["settings"]]
    same = [cell for cell in older if cell["settings"]["strategy"] == arm]
    return _named(*floor(same)) if same else "-"


def floor(cells: list[Cell]) -> tuple[int | None, Cell | None]:
    """The named budget, in bytes, and the run in it."""
    named = [smallest for cell in cells if not cell.get("named") and (smallest := smallest_named(cell)) is not None]
    runs = [cell for cell in cells if cell.get("named")]
    return (named[-1] if named else None), (runs[-1] if runs else None)


def kept(cell: Cell) -> bool:
    """Whether a run finished with measured <= predicted <= allowed, of the growth and of all processes."""
    if not succeeded([cell]):
        return False
    record, bounds = cell["record"], []
    for kind, of in (("memory_bytes", "peak_bytes"), ("total_memory_bytes", "total_memory_bytes")):
        allowed = record["budget"].get(kind)
        if allowed is not None:
            bounds.append(record["measured"][of] <= record["predicted"][of] <= allowed)
    return all(bounds)


def _our_row(arm: str, cells: list[Cell]) -> list[str]:
    (grown, run), (total, whole) = (floor(_of_arm(arm, cells, budget)) for budget in HOPELESS)
    records = [cell["record"] if cell is not None and kept(cell) else None for cell in (run, whole)]
    within = "-" if records[0] is None else ", ".join(mb(records[0][part]["peak_bytes"]) for part in MEASURED)
    in_all = "-" if records[1] is None else mb(records[1]["measured"]["total_memory_bytes"])
    start = [f"snugfit {arm}", ARMS[arm][0], _images(records[0] or records[1])]
    return [*start, _named(grown, run), _before(arm, cells), within, _named(total, whole), in_all]


def _images(record: dict[str, Any] | None) -> str:
    """Images at once, of the phases in which there are any; a range where they differ."""
    counts = sorted({phase["batch_size"] for phase in record["phases"] if phase["units"]}) if record else []
    return "-".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]])) if counts else "-"


def _named(named: int | None, run: Cell | None) -> str:
    """A named budget, and what became of the run in it unless it kept to it."""
    if named is None:
        return "not measured"
    return mb(named) + (", not tried" if run is None else "" if kept(run) else ", not kept")


def _gradients(cell: Cell) -> str | None:
    """What gradients and updates a peer's cell has; None of a cell of snugfit."""
    return {"bitsandbytes": "nearly exact"}.get(cell["way"], "exact") if "way" in cell else None


def _peer_row(way: str, cells: list[Cell]) -> list[str]:
    name, _, images = way.partition(":")
    own = [cell for cell in cells if cell["way"] == name and cell["settings"]["batch_size"] == int(images)]
    if not own:
        return [PEERS[way], "-", images, "not measured", *["-"] * 4]
    start = [PEERS[way], str(_gradients(own[-1])), images]
    if "missing" in own[-1]["outcome"]:
        return [*start, "not installed", *["-"] * 4]
    fitting = [cell for cell in own if trained(cell)]
    if not fitting:
        return [*start, f"failed: {own[0]['outcome']['failure']}".replace("|", "/"), *["-"] * 4]
    best = min(fitting, key=lambda cell: int(cell["outcome"]["cap_bytes"]))["outcome"]
    cap, rest = best["cap_bytes"], best["rest_bytes"]
    return [*start, mb(cap), "-", f"-, {mb(best['peak_bytes'])}", mb(cap + rest), mb(best["peak_bytes"] + rest)]


def conclusions(cells: list[Cell]) -> list[str]:
    """How many floors hold; and for each model the smallest growth with each kind of gradients, and of other ways."""
    runs = [cell for cell in cells if cell.get("named")]
    held = sum(kept(cell) for cell in runs)
    lines = [f"measured <= predicted <= budget, in the named budgets: {held} of {len(runs)} runs"]
    for model, pixels in dict.fromkeys(map(_key, cells)):
        own = [cell for cell in cells if _key(cell) == (model, pixels)]
        found: dict[str, int | None] = {}
        for level in dict.fromkeys(each for each, _ in ARMS.values()):
            floors = [floor(_of_arm(arm, own, "growth")) for arm, (each, _) in ARMS.items() if each == level]
            tried = [size for size, run in floors if size is not None and run is not None and kept(run)]
            found[f"snugfit {level}"] = min(tried, default=None)
            caps = [cell["outcome"]["cap_bytes"] for cell in own if _gradients(cell) == level and trained(cell)]
            if level != "local":
                found[f"other ways {level}"] = min(caps, default=None)
        shown = ", ".join(f"{name} {mb(size)}" for name, size in found.items())
        lines.append(f"smallest growth in MB, {model}{f' at {pixels} pixels' if pixels else ''}: {shown}")
    return lines


if __name__ == "__main__":
    app()
