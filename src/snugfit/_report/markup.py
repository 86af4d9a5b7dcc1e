"""Small pieces of HTML: everything that comes from outside is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any


def text(value: Any) -> str:
    """Escape anything for use as text or as an attribute."""
    return html.escape(str(value))


def tile(label: str, value: str, note: str = "", extra: str = "") -> str:
    """One headline figure; ``extra`` is HTML, the rest text."""
    small = f"<p class=note>{text(note)}</p>" if note else ""
    return f"<div class=tile><p class=label>{text(label)}</p><p class=value>{text(value)}</p>{extra}{small}</div>"


def figure(title: str, svg: str, caption: str, *, wide: bool = False) -> str:
    """A figure under a title that says the finding; ``wide`` takes all columns of a grid."""
    head = f"<figure{' class=wide' if wide else ''}><figcaption><h3>{text(title)}</h3></figcaption>"
    return f"{head}{svg}<p class=caption>{text(caption)}</p></figure>"


def card(title: str, body: str) -> str:
    """A titled card beside figures; ``body`` is HTML."""
    return f"<div class=card><h3>{text(title)}</h3>{body}</div>"


def grid(parts: Iterable[str]) -> str:
    """Figures and cards in one or two columns."""
    return f"<div class=grid>{''.join(parts)}</div>"


def absent(message: str) -> str:
    """A line in place of what is missing."""
    return f"<p class=absent>{text(message)}</p>"


def section(title: str, body: str) -> str:
    """A section; nothing at all when its body is empty."""
    return f"<section><h2>{text(title)}</h2>{body}</section>" if body else ""


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], marked: int | None = None, words: int = 1) -> str:
    """A table that scrolls sideways where it must.

    Args:
        head: column titles.
        rows: cells, escaped here.
        marked: index of a row to highlight.
        words: leading columns that hold words; the others are aligned right.
    """
    kind = ["" if i < words else " class=number" for i in range(len(head))]
    top = "".join(f"<th{kind[i]} scope=col>{text(cell)}</th>" for i, cell in enumerate(head))
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(f"<td{kind[i]}>{text(cell)}</td>" for i, cell in enumerate(row))
        lines.append(f"<tr{' class=marked' if index == marked else ''}>{cells}</tr>")
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def pairs(rows: Iterable[tuple[str, Any]]) -> str:
    """A list of names and values."""
    return "<dl>" + "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in rows) + "</dl>"


def meter(measured: float, predicted: float | None, budget: float) -> str:
    """A bar that shows measured and predicted use against the budget (its right-hand mark)."""
    top = max(measured, predicted or 0.0, budget) or 1.0
    spans = [f'<i class="predicted" style="width:{100 * (predicted or 0) / top:.1f}%"></i>']
    spans.append(f'<i class="measured" style="width:{100 * measured / top:.1f}%"></i>')
    spans.append(f'<i class="limit" style="left:{100 * budget / top:.1f}%"></i>')
    return f'<div class=meter aria-hidden="true">{"".join(spans)}</div>'
