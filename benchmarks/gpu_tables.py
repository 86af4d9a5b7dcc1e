"""The tables of ``benchmarks.gpu``."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.common import EXCEEDED, Cell, smallest_named
from benchmarks.store import accuracy, markdown, mb, percent, succeeded

NOTHING = "Nothing has been run yet."


def render(cells: list[Cell], part: str) -> str:
    """The table of one part, and what it shows in a sentence."""
    own = [cell for cell in cells if cell.get("arm") == part or (part == "peers" and cell.get("arm") == "peer")]
    if not own:
        return f"**{part}**: {NOTHING}"
    table: Callable[[list[Cell]], str] = {"tests": _tests, "settings": _settings}.get(part, _runs)
    return f"**{part}**\n\n{table(own)}"


def _tests(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        count = cell["counts"]
        bad = count.get("failures", 0) + count.get("errors", 0)
        passed = count.get("tests", 0) - bad - count.get("skipped", 0)
        rows.append([cell["command"].rpartition("/")[2], str(passed), str(bad), str(count.get("skipped", 0))])
    failed = [f"- {name}: {message}" for cell in cells for name, message in cell["failed"]]
    return "\n".join([markdown(("tests", "passed", "failed", "skipped"), rows), *failed])


def _settings(cells: list[Cell]) -> str:
    header = ("model", "changed", "ms per step", "tensors (MB)", "reserved (MB)")
    rows = []
    for cell in cells:
        found = cell.get("output") or {}
        seconds = f"{1000 * found['seconds_per_step']:.1f}" if found else "failed"
        rows.append([cell["model"], cell["changed"], seconds, mb(found.get("allocated")), mb(found.get("reserved"))])
    return markdown(header, rows)


def _runs(cells: list[Cell]) -> str:
    header = (
        "model", "way", "MB above the context", "context", "tensors", "fragmentation", "measured (MB)",
        "predicted (MB)", "allowed (MB)", "images at once", "s per epoch", "accuracy",
    )  # fmt: skip
    return "\n\n".join([markdown(header, list(map(_row, cells))), _conclusion(cells)])


def _row(cell: Cell) -> list[str]:
    settings = cell["settings"]
    names = [settings.get(key) for key in ("strategy", "activations", "precision", "local_loss", "time_ratio", "data")]
    row = [settings["model"], cell.get("way") or " ".join(str(each) for each in names if each)]
    row.append(str(cell.get("above_mb") or "-"))
    if "way" in cell:
        found = cell.get("outcome", {})
        failure = found.get("failure")
        seconds = found.get("seconds_per_epoch")
        return [
            *row, "-", "-", "-", mb(found.get("peak_bytes")), "-", mb(found.get("cap_bytes")),
            "refused" if found.get("refused") else str(failure or found.get("micro_batch", "-"))[:60],
            "-" if seconds is None else f"{seconds:.3g}", _share(found.get("accuracy")),
        ]  # fmt: skip
    if "record" not in cell:
        smallest = smallest_named(cell)
        why = f"needs {mb(smallest)} MB" if smallest else cell.get("error", {}).get("message", "stopped")[:60]
        return [*row, *["-"] * 6, why, "-", "-"]
    record, device = cell["record"], cell["record"]["measured"].get("device_memory") or {}
    epochs = max(sum(phase["epochs"] for phase in record["phases"]), 1)
    return [
        *row, *(mb(device.get(kind)) for kind in ("context_bytes", "allocated_bytes", "fragmentation_bytes")),
        mb(record["measured"]["peak_bytes"]), mb(record["predicted"]["peak_bytes"]),
        mb(record["budget"]["memory_bytes"]), str(max(phase["batch_size"] for phase in record["phases"])),
        f"{cell['training_seconds'] / epochs:.3g}" if cell.get("jobs", 1) == 1 else "-", _share(accuracy(cell)),
    ]  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def _conclusion(cells: list[Cell]) -> str:
    """How many runs stayed within prediction and budget, and how far predictions lie above."""
    done, exceeded = succeeded(cells), sum(cell.get("exit_code") == EXCEEDED for cell in cells)
    if not done:
        return f"No run of snugfit finished; {exceeded} went over the budget."
    peaks = [(each["record"]["measured"]["peak_bytes"], each["record"]["predicted"]["peak_bytes"]) for each in done]
    budgets = [each["record"]["budget"]["memory_bytes"] for each in done]
    over = sum(budget is not None and peak > budget for (peak, _), budget in zip(peaks, budgets, strict=True))
    over += exceeded
    missed = sum(peak > predicted for peak, predicted in peaks)
    near = sum(predicted <= 1.10 * peak for peak, predicted in peaks)
    return (
        f"Of {len(done) + exceeded} runs, {over} went over the budget and {missed} over the prediction; "
        f"{near} predictions are at most 1.10 times the measured peak."
    )
