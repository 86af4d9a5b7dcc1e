"""Tables of the comparison with peers."""

from __future__ import annotations

from benchmarks.common import Cell
from benchmarks.store import markdown, mb, middle, number

NAMES = {
    "snugfit-exact": "snugfit, exact gradients", "snugfit": "snugfit, its choice", "plain": "plain PyTorch",
    "micro": "micro-batches by halving", "checkpoint": "checkpoint_sequential", "lightning": "Lightning's batch finder",
    "accelerate": "accelerate's batch finder",
}  # fmt: skip


def render(cells: list[Cell]) -> str:
    """One table for each model, cap and time."""
    peers = [cell for cell in cells if cell["arm"] == "peer"]
    subjects = dict.fromkeys(map(_subject, peers))
    return "\n\n".join(_table(subject, [cell for cell in peers if _subject(cell) == subject]) for subject in subjects)


def _subject(cell: Cell) -> tuple[str, str, str, float, int, int]:
    settings, pixels = cell["settings"], cell["settings"].get("image_size")
    data = f"{settings['data']} at {pixels} pixels" if pixels else settings["data"]
    return settings["model"], data, settings["memory"], cell["time"], settings["max_train"], settings["batch_size"]


def _table(subject: tuple[str, str, str, float, int, int], cells: list[Cell]) -> str:
    model, data, memory, seconds, images, batch = subject
    title = (
        f"**{model} on {data} in {memory}: {seconds:.0f} s each, search included; {images:,} training images an epoch, "
        f"batch {batch}.**"
    )
    header = (
        "way", "stays under the cap", "peak (MB)", "found", "search (s)", "time per epoch (s)", "step, median (s)",
        "images trained on", "time used (s)",
    )  # fmt: skip
    ways: dict[tuple[str, bool], list[Cell]] = {}
    for cell in cells:
        ways.setdefault((cell["way"], bool(cell["settings"].get("keep_freed"))), []).append(cell)
    return f"{title}\n\n{markdown(header, [row(repeats) for repeats in ways.values()])}"


def row(repeats: list[Cell]) -> list[str]:
    """One way's row: medians of its repetitions, or the first that failed."""
    failed = [cell for cell in repeats if "missing" in cell["outcome"] or verdict(cell["outcome"]) != "yes"]
    cell = (failed or repeats)[0]
    name, outcome = cell["way"], cell["outcome"]
    shown = NAMES.get(name, name.replace("compile-", "torch.compile, activation_memory_budget "))
    if "missing" in outcome:
        return [shown, f"not measured: no {outcome['missing']}", *["-"] * 7]

    def of(key: str) -> float | None:
        return middle(each["outcome"].get(key) for each in repeats)

    return [
        shown, verdict(outcome), mb(of("peak_bytes")), found(cell), number(of("search_seconds"), 1),
        number(middle(map(epoch_seconds, repeats)), 1), number(of("step_seconds"), 2), f"{of('images') or 0:,.0f}",
        number(of("used_seconds"), 0),
    ]  # fmt: skip


def epoch_seconds(cell: Cell) -> float | None:
    """Seconds of an epoch, of snugfit's without passes for norm statistics, which peers do not make."""
    outcome, record = cell["outcome"], cell.get("record")
    if record is None or not outcome.get("images"):
        return outcome.get("seconds_per_epoch")
    passes = record.get("overhead_seconds", {}).get("statistics", 0.0)
    return outcome["seconds_per_epoch"] - passes * cell["settings"]["max_train"] / outcome["images"]


def verdict(outcome: Cell) -> str:
    """Whether a way stayed under the cap, in words."""
    if outcome.get("failure"):
        kind = "no: refused memory" if outcome.get("refused") else "no: failed"
        return f"{kind} ({outcome['failure']})".replace("|", "/")
    return "yes" if outcome["within"] else "no: above it"


def found(cell: Cell) -> str:
    """What a way settled on, and whether the heap of a peer keeps freed memory."""
    outcome = cell["outcome"]
    marks = [outcome["strategy"]] if "strategy" in outcome else []
    marks += [f"micro-batch {outcome['micro_batch']}"] if "micro_batch" in outcome else []
    marks += [f"{outcome['segments']} segments"] if "segments" in outcome else []
    marks += [f"compiled in {outcome['compile_seconds']} s"] if "compile_seconds" in outcome else []
    marks += ["freed memory kept"] if cell["settings"].get("keep_freed") else []
    return ", ".join(marks) or "-"
