"""The page on activation memory: three bars per block, and every figure of the whole step."""

import re

from snugfit._report.activation import render_activation, totals

BLOCKS = [
    {"name": "stem", "temporary_bytes": 3_000_000, "cumulative_bytes": 200_000, "peak_bytes": 3_000_000},
    {"name": "<b>", "temporary_bytes": 1_000_000, "cumulative_bytes": 700_000, "peak_bytes": 1_400_000},
]
FIGURE = {
    "peak_bytes": 3_000_000, "peak_block": 0, "cumulative_bytes": 700_000, "total_bytes": 25_000_000, "batch": 8,
    "parameter_bytes": 1_000_000, "blocks": BLOCKS,
}  # fmt: skip
DATA = {
    **FIGURE, "trained": "sidenet", "side_first": {"peak_bytes": 3_100_000, "total_bytes": 26_000_000},
    "resident": {"weights": 2_000_000, "optimizer": 4_000_000},
    "measured": {"batch": 8, "tensor_peak_bytes": 24_500_000},
}  # fmt: skip


def test_every_block_has_three_bars():
    page = render_activation("net", DATA)
    tips = re.findall(r"<title>(block [^<]*)</title>", page)
    assert len(tips) == 3 * len(BLOCKS)
    assert tips[0] == "block 0, stem: temporary 3.0 MB"
    assert {tip.split(": ")[1].split()[0] for tip in tips} == {"temporary", "cumulative", "peak"}


def test_names_are_escaped_and_nothing_is_fetched():
    page = render_activation("<script>", DATA)
    assert "<script>" not in page and "block 1, <b>" not in page
    assert "http" not in re.sub(r'xmlns[^"]*"[^"]*"', "", page)


def test_totals_say_what_was_measured():
    rows = dict(totals(DATA))
    assert rows["measured, tensors of a step of 8"] == "24.5 MB"
    assert rows["the same, side modules ahead of blocks"] == "26.0 MB"
    without = dict(totals({**DATA, "trained": "full", "measured": {"batch": 8, "tensor_peak_bytes": None}}))
    assert without["measured, tensors of a step of 8"] == "too much"
    assert "the same, side modules ahead of blocks" not in without
