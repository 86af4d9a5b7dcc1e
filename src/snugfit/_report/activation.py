"""Page on activation memory per block (Yoosefi et al., Figures 1 and 3): by the paper's rule and by liveness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snugfit._quantities import format_bytes
from snugfit._report.markup import html, page
from snugfit._storage.outputs import require_folder, whole_file

CHART = "Choose another --chart."


def write_activation_page(path: Path, model: str, data: dict[str, Any]) -> Path:
    """Draw the charts of ``activation_memory`` of ``snugfit profile --json`` as one self-contained page.

    Args:
        path: the page; its folder is made.
        model: name of the model.
        data: the object of that name in ``profile --json``.

    Raises:
        UsageError, OutOfStorageError: the page cannot be written.
    """
    require_folder(path.parent, CHART)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, CHART) as file:
        file.write(render_activation(model, data))
    return path


def render_activation(model: str, data: dict[str, Any]) -> str:
    """The page as HTML."""
    from snugfit._report.activation_chart import activation_bars

    true, peak = data["true"], data["peak_block"]
    title = f"Activation memory of {model}, {data['trained']} trained"
    figures = [
        html.figure(
            f"Block {peak} sets the peak of {format_bytes(data['peak_bytes'])} per image",
            activation_bars(data, f"activation memory by block, {format_bytes(data['peak_bytes'])} at most"),
            "The paper's rule: one image, forward pass alone, masks of a bit (equations 1 to 6).",
            wide=True,
        ),
        html.figure(
            f"By liveness, block {true['peak_block']} sets the peak of {format_bytes(true['peak_bytes'])}",
            activation_bars(true, f"true memory by block, {format_bytes(true['peak_bytes'])} at most"),
            f"A batch of {true['batch']}, forward and backward pass, the images included.",
            wide=True,
        ),
    ]
    charts = html.grid([*figures, html.card("Whole step", html.pairs(totals(data)))])
    return page(title, "snugfit profile", title, [("", charts)])


def totals(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of all figures for a whole step."""
    true, measured = data["true"], data["measured"]["tensor_peak_bytes"]
    resident = true["resident"]
    rows = [(f"the paper's rule, batch {data['batch']}", format_bytes(data["total_bytes"]))]
    if data["trained"] == "sidenet":
        rows.append(("the same, side modules ahead of blocks", format_bytes(data["side_first"]["total_bytes"])))
    return [
        *rows,
        (f"true, batch {true['batch']}", format_bytes(true["total_bytes"])),
        ("of it weights", format_bytes(resident["weights"])),
        ("of it optimizer state", format_bytes(resident["optimizer"])),
        ("measured, tensors of a step", "not measured: too much" if measured is None else format_bytes(measured)),
    ]
