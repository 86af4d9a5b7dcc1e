"""Tables of the claims about ``sidenet``."""

from __future__ import annotations

from benchmarks.common import INFEASIBLE, Cell
from benchmarks.sidenet_steps import PAPERS_RATIOS
from benchmarks.store import accuracy, markdown, mb, number, percent


def render(cells: list[Cell]) -> str:
    """All tables for which there are results."""
    parts = []
    for arm, part in (("activation", _activations), ("memory", _memory), ("transfer", _transfer)):
        found = [cell for cell in cells if cell["arm"] == arm]
        if found:
            parts.append(part(found))
    return "\n\n".join(parts)


def _activations(cells: list[Cell]) -> str:
    parts = []
    for cell in cells:
        settings = cell["settings"]
        rows = []
        for name, way in cell["ways"].items():
            rule = way["rule"]
            rows.append((
                name, f"{rule['peak']:,} (block {rule['block']})", f"{rule['kept']:,}", mb(rule["total"]),
                mb(way["measured_activations"]), mb(way["measured_total"]),
            ))  # fmt: skip
        header = (
            "way", "rule: peak of an image (bytes)", "rule: kept (bytes)", "rule: total (MB)",
            "measured activations (MB)", "measured total (MB)",
        )  # fmt: skip
        title = (
            f"**{settings['model']} at {settings['image_size']} pixels, batch {settings['batch_size']}.** Rule: the "
            "paper's accounting, frozen weights at 1 byte, no gradients or optimizer. Measured: all tensors of a step; "
            "activations are what weights and Adam's state leave of them.\n\n"
        )
        parts.append(title + markdown(header, rows) + "\n\n" + _ratios(cell["channels"]))
    return "\n\n".join(parts)


def _ratios(channels: dict[str, tuple[int, int]]) -> str:
    rows = [
        (name, before, after, number(1 - after / before), number(papers))
        for (name, (before, after)), papers in zip(
            channels.items(), (*PAPERS_RATIOS, *[None] * len(channels)), strict=False
        )
    ]
    header = ("channels of", "before", "after", "computed ratio", "the paper's, chosen by hand (blocks 1 to 4)")
    return "**Computed pruning ratios.**\n\n" + markdown(header, rows)


def _memory(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        budget = cell["settings"]["memory"]
        if cell["exit_code"] == INFEASIBLE:
            rows.append((budget, "infeasible", "", "", "", "", ""))
        elif "record" in cell:
            record = cell["record"]
            measured, chosen = record["measured"], record["settings"]
            rows.append((
                budget, _chosen(chosen), f"{chosen['micro_batch']} x {chosen['micro_batches']}",
                mb(measured["tensor_peak_bytes"]), mb(record["predicted"]["peak_bytes"]), mb(measured["peak_bytes"]),
                number(record["predicted"]["peak_bytes"] / measured["peak_bytes"]),
            ))  # fmt: skip
    header = (
        "budget", "chosen", "batch", "tensors (MB)", "predicted peak (MB)", "measured peak (MB)",
        "predicted over measured",
    )  # fmt: skip
    return "**What is chosen in an enforced budget.** Peak: RssAnon above the baseline.\n\n" + markdown(header, rows)


def _chosen(settings: dict[str, object]) -> str:
    marks = [f"width {settings['side_width']:g}"] if settings.get("side_width") else []
    marks += ["image by image"] if settings["sample_wise"] == "on" else []
    marks += ["int8"] if settings["weight_storage"] == "int8" else []
    marks += ["pruned"] if settings["prune"] != "off" else []
    return ", ".join(marks) or "as it is"


def _transfer(cells: list[Cell]) -> str:
    parts = []
    for data, most in dict.fromkeys(_images(cell) for cell in cells):
        same = [cell for cell in cells if _images(cell) == (data, most) and "record" in cell]
        if not same:
            continue
        settings, base = same[0]["settings"], next((c for c in same if c["method"] == "Rep-Net"), None)
        rows = []
        for cell in same:
            measured, seconds = cell["record"]["measured"], cell["training_seconds"]
            loss = None if base is None else (accuracy(base) or 0) - (accuracy(cell) or 0)
            rows.append((
                cell["method"], percent(accuracy(cell)), percent(cell["record"]["accuracy"]["val"]),
                percent(loss), mb(measured["tensor_peak_bytes"]), mb(measured["peak_bytes"]),
                mb(cell["record"]["predicted"]["peak_bytes"]), f"{seconds:.0f} s",
            ))  # fmt: skip
        header = (
            "method", "test", "validation", "lost against Rep-Net", "tensors (MB)", "measured peak (MB)",
            "predicted peak (MB)", "training",
        )  # fmt: skip
        title = (
            f"**{settings['model']} on {data}, {settings['image_size']} pixels, {settings['epochs']} epochs, batch "
            f"{settings['batch_size']}, {settings['max_train'] or 'all'} training images, "
            f"{most or 'all'} validation and test images, seed {settings['seed']}.**"
        )
        parts.append(f"{title}\n\n{markdown(header, rows)}")
    return "\n\n".join(parts)


def _images(cell: Cell) -> tuple[str, int | None]:
    """Data set, and its validation and test images where they are limited: what is compared in one table."""
    return cell["settings"]["data"], cell["settings"].get("max_val")
