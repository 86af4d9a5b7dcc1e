"""Tables in the terminal."""

from __future__ import annotations

import io

from rich.table import Column

from snugfit._report.tables import make_table, print_tables


def test_names_are_to_the_left_and_figures_to_the_right():
    stream = io.StringIO()
    first = make_table(
        "Units\nof a network", ("unit", "bytes", Column("host")), [("a", "1", "x"), ("longer", "100", "yy")]
    )
    print_tables(first, make_table("", ("b",), [("[1]",)]), file=stream)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[:5] == ["Units", "of a network", "unit    bytes  host", "a           1  x", "longer    100  yy"]
    assert lines[5:] == ["", "b", "[1]"]
