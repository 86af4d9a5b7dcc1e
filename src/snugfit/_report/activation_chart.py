"""Bars of temporary, cumulative and peak memory per block (Yoosefi et al., Figures 1 and 3). Imported only to draw."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np

from snugfit._quantities import format_bytes
from snugfit._report.canvas import STYLE, canvas, inline, legend, limit_line
from snugfit._report.formatting import MB
from snugfit._report.svg import PALETTE, TIP

_BARS = (("temporary", "block1"), ("cumulative", "block2"), ("peak", "block4"))
"""What is drawn of each block, from left to right, and its colour."""
_BAR_WIDTH = 0.27


@mpl.rc_context(STYLE)
def activation_bars(memory: dict[str, Any], label: str) -> str:
    """Three bars per block, and a line at the bytes kept in all; a block is sensitive if its temporary memory is above.

    Args:
        memory: ``cumulative_bytes`` and ``blocks`` with ``name``, ``temporary_bytes``, ``cumulative_bytes`` and
            ``peak_bytes``.
        label: text for screen readers.
    """
    blocks = memory["blocks"]
    figure, axes = canvas("block", "memory (MB)", height=3.6, width=max(4.6, 0.42 * len(blocks)))
    places = np.arange(len(blocks))
    for offset, (kind, colour) in zip((-_BAR_WIDTH, 0.0, _BAR_WIDTH), _BARS, strict=True):
        for place, block in zip(places, blocks, strict=True):
            size = block[f"{kind}_bytes"]
            tip = f"{TIP}block {place}, {block['name']}: {kind} {format_bytes(size)}"
            axes.bar(place + offset, size / MB, _BAR_WIDTH, color=PALETTE[colour], gid=tip)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_xlim(-0.6, len(blocks) - 0.4)
    axes.grid(visible=False, axis="x")
    limit_line(axes, memory["cumulative_bytes"] / MB, "kept in all")
    legend(figure, [(kind, PALETTE[colour], "s") for kind, colour in _BARS])
    return inline(figure, label)
