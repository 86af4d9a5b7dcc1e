"""Tables in the terminal: names to the left, figures to the right, no frame."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

PIPE_WIDTH = 120
"""Columns of what is written to a file or pipe."""


def make_console(file: TextIO | None = None) -> Console:
    """A console on a stream, stderr by default, that shows text as it is: no markup, no emoji, no guessed colours."""
    stream = file or sys.stderr
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def make_table(
    title: str, columns: Sequence[str | Column], rows: Iterable[Sequence[RenderableType]] = (), style: str = "bold"
) -> Table:
    """A table of text.

    Args:
        title: one or more lines above it; none if empty.
        columns: headings; the first column is names, and the others are figures. A ``Column`` has its own layout.
        rows: cells of each row.
        style: of the title.
    """
    heads = [
        each if isinstance(each, Column) else Column(each, justify="right" if index else "left")
        for index, each in enumerate(columns)
    ]
    shown = Text(title, style) if title else None
    table = Table(*heads, title=shown, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table


def print_tables(*tables: Table, file: TextIO | None = None) -> None:
    """Print tables one after the other, with an empty line between them; to stderr by default."""
    console = make_console(file)
    for index, table in enumerate(tables):
        if index:
            console.print()
        console.print(table)
