"""Tables of the claims about ``tiled``."""

from __future__ import annotations

import statistics

from benchmarks.common import Cell
from benchmarks.store import markdown, mb, number

GATEWAY_AND_SUMS = ("gateway", "sums")


def render(cells: list[Cell]) -> str:
    """All tables for which there are results."""
    parts = []
    for arm, part in (("memory", _memory), ("speed", _speed), ("links", _links), ("sequential", _sequential)):
        found = [cell for cell in cells if cell["arm"] == arm]
        if found:
            parts.append(part(found))
    return "\n\n".join(parts)


def _memory(cells: list[Cell]) -> str:
    rows, first = [], dict[bool, int]()
    for cell in cells:
        found, job = cell["found"][0], cell["jobs"][0]
        activations = max(p - w for p, w in zip(found["peak_bytes"], found["weight_bytes"], strict=True))
        whole = first.setdefault(job["recompute"], activations)
        rows.append((
            cell["processes"], f"{job['grid'][0]}x{job['grid'][1]}", "anew" if job["recompute"] else "kept",
            mb(activations), number(whole / activations, 1), mb(max(found["peak_bytes"])),
            mb(max(found["resident_bytes"])),
        ))  # fmt: skip
    header = (
        "processes", "tiles", "maps", "activations (MB)", "one process over these", "all tensors (MB)",
        "process, resident after a step (MB)",
    )  # fmt: skip
    size, batch = cells[0]["jobs"][0]["size"], cells[0]["jobs"][0]["batch"]
    title = (
        f"**YOLOv2's first 16 layers at {size} pixels, batch {batch}: peak of tensors of the hungriest process.** "
        "Activations are all but weights, buffers and gradients of weights. The paper tells 400 to 50 MB in all.\n\n"
    )
    return title + markdown(header, rows)


def _speed(cells: list[Cell]) -> str:
    rows, parts = [], []
    for cell in cells:
        found, batch = medians(cell), cell["jobs"][0]["batch"]
        one = found["one process"]
        rows.append((
            batch, number(one, 3), *(number(found.get(n), 3) for n in ("tiled", "two threads", "DDP", "pipeline")),
            *(number(one / found[n] / 2, 2) for n in ("tiled", "two threads", "DDP")),
            number(found["one process, frozen norms"] / found["tiled, frozen norms"] / 2, 2),
        ))  # fmt: skip
        split = {key: medians(cell, key).get("tiled", 0.0) for key in _SPLIT}
        waits = sum(split[key] for key in _SPLIT[3:])
        parts.append((
            batch, *(number(split[key], 3) for key in ("forward", "backward", "update")),
            *(number(split[f"{kind}_forward"] + split[f"{kind}_backward"], 3) for kind in ("halos", "gateway", "sums")),
            number(split["forward"] + split["backward"] - waits, 3),
        ))  # fmt: skip
    header = (
        "batch", "one process, one thread (s)", "tiled, two processes of one thread (s)",
        "one process, two threads (s)", "DDP, two processes (s)", "pipeline, two processes (s)",
        "efficiency of tiles", "of threads", "of DDP", "of tiles with frozen norms",
    )  # fmt: skip
    title = "**A step of YOLOv2's first 16 layers, median seconds, in turns; efficiency is speed-up over two.** " + (
        "DDP cannot split one image: at batch 1 both of its processes do all of it.\n\n"
    )
    split_header = (
        "batch", "forward (s)", "backward (s)", "sums of gradients (s)", "waiting for halos (s)", "for the gateway (s)",
        "for sums of norms (s)", "computing (s)",
    )  # fmt: skip
    return (
        title + markdown(header, rows) + "\n\n**Where the tiled step's time goes.**\n\n" + markdown(split_header, parts)
    )


_SPLIT = (
    "forward", "backward", "update", "halos_forward", "halos_backward", "gateway_forward", "gateway_backward",
    "sums_forward", "sums_backward",
)  # fmt: skip


def _links(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        half = len(cell["names"])
        for direction, part in (("forward", cell["found"][:half]), ("backward", cell["found"][half:])):
            seconds = {name: each[direction] for name, each in zip(cell["names"], part, strict=True)}
            told = {name: way[f"predicted_{direction}"] for name, way in cell["ways"].items()}
            better = min(seconds["one group"], seconds["a group per layer"])
            rows.append((
                cell["rate"], direction, *(number(value, 2) for value in seconds.values()),
                number(seconds["chosen"] / better, 2), *(number(value, 2) for value in told.values()),
                _groups(cell["ways"]["chosen"][direction]),
            ))  # fmt: skip
    header = (
        "link", "pass", "one group (s)", "a group per layer (s)", "chosen (s)", "chosen over the better",
        "predicted: one", "per layer", "chosen", "chosen groups",
    )  # fmt: skip
    size, batch = cells[0]["jobs"][0]["size"], cells[0]["jobs"][0]["batch"]
    title = (
        f"**Two hosts, a tile each, over links of different speed; {size} pixels, batch {batch}, frozen norms.** "
        "With what the gateway sends and gets.\n\n"
    )
    return title + markdown(header, rows)


def _sequential(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        whole = cell["found"][0]
        base = whole["peak_bytes"] - whole["weight_bytes"]
        for job, found in zip(cell["jobs"], cell["found"], strict=True):
            activations = found["peak_bytes"] - found["weight_bytes"]
            grid = f"{job['grid'][0]}x{job['grid'][1]}" if "grid" in job else "whole"
            rows.append((
                "frozen" if job["frozen"] else "of the batch", grid, "in files" if job.get("scratch") else "in memory",
                _groups(job.get("forward", "-")),
                mb(activations), number(base / activations, 1), number(found["seconds"], 3),
                number(found["seconds"] / whole["seconds"], 2), mb(found.get("grown_bytes")),
                mb(found.get("stored_bytes")),
            ))  # fmt: skip
    header = (
        "statistics", "tiles", "whole maps", "groups", "activations (MB)", "whole over these", "seconds", "over whole",
        "process, grows in a step (MB)", "files (MB)",
    )  # fmt: skip
    size, batch = cells[0]["jobs"][0]["size"], cells[0]["jobs"][0]["batch"]
    title = (
        f"**Tile after tile on one device, {size} pixels, batch {batch}, one thread.** Activations are tensors in "
        "memory but for weights, buffers and gradients of weights; private memory (RssAnon) grows by these gradients "
        "and by what operators take as well.\n\n"
    )
    return title + markdown(header, rows)


def _groups(profile: str) -> str:
    """A profile without the character that ends a cell."""
    return profile.replace(" | ", ", ")


def medians(cell: Cell, key: str = "seconds") -> dict[str, float]:
    """Of every name of a cell, the median of a figure over its turns."""
    found: dict[str, list[float]] = {}
    for name, each in zip(cell["names"], cell["found"], strict=True):
        if key in each:
            found.setdefault(name, []).append(each[key])
    return {name: statistics.median(values) for name, values in found.items()}
