"""Lines for a terminal, broken between words; those of a pipe or a file stay whole."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import IO


def has_width(stream: IO[str]) -> bool:
    """Whether lines have a width: that of a terminal, or of the variable ``COLUMNS``."""
    return stream.isatty() or os.environ.get("COLUMNS", "").isdecimal()


def wrapped(text: str, stream: IO[str]) -> str:
    """Text of one or more lines as it is shown on a stream; a word that is too long for a line stays whole."""
    if not has_width(stream):
        return text
    width = _columns(stream)
    return "\n".join(line for each in text.splitlines() for line in broken(each, width) or [""])


def broken(line: str, width: int, indent: str = "") -> list[str]:
    """A line as lines of at most ``width`` columns, the second and later ones behind an indent."""
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def command_lines(lead: str, command: Sequence[str], width: int) -> Iterator[str]:
    """A shell command behind a lead, in lines that continue with a backslash and can be copied."""
    line = lead + command[0]
    for number, argument in enumerate(map(shlex.quote, command[1:]), start=2):
        room = width if number == len(command) else width - len(" \\")
        if len(line) + 1 + len(argument) > room:
            yield f"{line} \\"
            line = f"    {argument}"
        else:
            line += f" {argument}"
    yield line


def _columns(stream: IO[str]) -> int:
    if os.environ.get("COLUMNS", "").isdecimal():
        return get_terminal_size().columns
    try:
        return os.get_terminal_size(stream.fileno()).columns or get_terminal_size().columns
    except (OSError, ValueError):
        return get_terminal_size().columns
