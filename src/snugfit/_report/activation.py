"""Page on activation memory per block (Yoosefi et al., Figures 1 and 3), by the paper's rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snugfit._quantities import MB, format_bytes
from snugfit._report.markup import html, page
from snugfit._storage.outputs import require_folder, whole_file

CHART = "Choose another --chart."
_BARS = (("temporary", "block1"), ("cumulative", "block2"), ("peak", "block4"))
"""What is drawn of each block, from left to right, and its colour."""
_BAR_WIDTH = 0.27


def write_activation_page(path: Path, model: str, data: dict[str, Any]) -> Path:
    """Draw the charts of ``activation_memory`` of ``snugfit profile --json`` as one self-contained page.

    The page's folder is made.

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
    peak = data["peak_block"]
    title = f"Activation memory of {model}, {data['trained']} trained"
    chart = html.figure(
        f"Block {peak} sets the peak of {format_bytes(data['peak_bytes'])} per image",
        _draw_bars(data, f"activation memory by block, {format_bytes(data['peak_bytes'])} at most"),
        "The paper's rule: one image, forward pass alone, masks of a bit (equations 1 to 6).",
        wide=True,
    )
    charts = html.grid([chart, html.card("Whole step", html.pairs(totals(data)))])
    return page(title, "snugfit profile", title, [("", charts)])


def _draw_bars(memory: dict[str, Any], label: str) -> str:
    """Three bars per block, and a line at the bytes kept in all; a block is sensitive if its temporary memory is above.

    ``memory`` holds ``cumulative_bytes`` and ``blocks`` with ``name``, ``temporary_bytes``, ``cumulative_bytes`` and
    ``peak_bytes``.
    """
    import matplotlib as mpl

    from snugfit._report import canvas
    from snugfit._report.canvas import PALETTE, STYLE, TIP

    blocks = memory["blocks"]
    with mpl.rc_context(STYLE):
        figure, axes = canvas.new_figure("block", "memory (MB)", 3.6, max(4.6, 0.42 * len(blocks)), grid="y")
        for offset, (kind, colour) in zip((-_BAR_WIDTH, 0.0, _BAR_WIDTH), _BARS, strict=True):
            for place, block in enumerate(blocks):
                size = block[f"{kind}_bytes"]
                tip = f"{TIP}block {place}, {block['name']}: {kind} {format_bytes(size)}"
                axes.bar(place + offset, size / MB, _BAR_WIDTH, color=PALETTE[colour], gid=tip)
        axes.set_xticks(range(len(blocks)), [str(place) for place in range(len(blocks))])
        axes.set_xlim(-0.6, len(blocks) - 0.4)
        canvas.limit_line(axes, memory["cumulative_bytes"] / MB, "kept in all")
        canvas.legend(figure, [(kind, PALETTE[colour], "s") for kind, colour in _BARS])
        return canvas.inline(figure, label)


def totals(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of all figures for a whole step."""
    measured, resident = data["measured"], data["resident"]
    peak = measured["tensor_peak_bytes"]
    rows = [(f"the paper's rule, batch {data['batch']}", format_bytes(data["total_bytes"]))]
    if data["trained"] == "sidenet":
        rows.append(("the same, side modules ahead of blocks", format_bytes(data["side_first"]["total_bytes"])))
    return [
        *rows,
        (f"measured, tensors of a step of {measured['batch']}", "too much" if peak is None else format_bytes(peak)),
        ("of it weights", format_bytes(resident["weights"])),
        ("of it optimizer state", format_bytes(resident["optimizer"])),
    ]
