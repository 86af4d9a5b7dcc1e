"""Convert matplotlib's SVG into an inline one: small, themed by CSS variables, with tooltips."""

from __future__ import annotations

import html
import re

PALETTE: dict[str, str] = {
    "ink": "#1b2330",
    "muted": "#667080",
    "grid": "#e1e5ea",
    "card": "#fffffe",
    "measured": "#2f6fb6",
    "predicted": "#bcd3ec",
    "budget": "#c2332b",
    "chosen": "#d9570c",
    "block1": "#2f6fb5",
    "block2": "#c27c00",
    "block3": "#0f9d7a",
    "block4": "#7a2660",
    "block5": "#49a9de",
}
"""Colours that figures are drawn in; each becomes ``var(--NAME)``, light and dark in ``style.css``."""

TIP = "tip:"
"""Prefix of an artist's gid whose rest becomes its tooltip."""

BLOCK_COLOURS = 5
"""After this many blocks colours repeat."""


def block_colour(index: int) -> str:
    """Colour of block ``index`` (from 0): five colours that colour-blind readers can distinguish, then again."""
    return PALETTE[f"block{index % BLOCK_COLOURS + 1}"]


def themed(svg: str, label: str) -> str:
    """Turn matplotlib's SVG document into an inline ``<svg>`` element.

    Drops the prolog, metadata, style sheet and unused ids, and turns palette colours into CSS variables and
    gids that start with ``tip:`` into tooltips.

    Args:
        svg: the document, saved with ``svg.fonttype: none``.
        label: text for screen readers.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*</defs>", "", body)
    body = re.sub(rf'<g id="{TIP}([^"]*)">', r"<g><title>\1</title>", body)
    body = re.sub(r'<g id="[^"]*">', "<g>", body).replace("xlink:href", "href")
    view = re.search(r'viewBox="([^"]*)"', body)
    box = view.group(1) if view else "0 0 345 230"
    head = f'<svg viewBox="{box}" role="img" aria-label="{html.escape(label)}">'
    body = re.sub(r"^<svg[^>]*>", lambda _: head, body, count=1, flags=re.DOTALL)
    for name, colour in PALETTE.items():
        body = body.replace(colour, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", body).strip()
