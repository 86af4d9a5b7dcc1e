"""The short help of a command: the most used flags in a line each."""

from __future__ import annotations

import inspect
import shlex
import typing
from collections.abc import Callable
from shutil import get_terminal_size
from typing import Any

from snugfit._core.options import common_options
from snugfit._report.wrapping import broken, command_lines

ALL_FLAGS = "--help-all"


def short_help(name: str, function: Callable[..., Any]) -> str:
    """Usage, summary, the flags marked as :class:`~snugfit._core.options.Common`, and the docstring's examples."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = [each for each in hints.items() if each[0] != "return"]
    found = [mark for each in parameters for mark in common_options(*each)]
    marked = [(option, mark) for option, mark in found if name in (mark.commands or (name,))]
    flags = {f"--{option.replace('_', '-')} {mark.value}".strip(): mark.text for option, mark in marked}
    documentation = inspect.cleandoc(function.__doc__ or "")
    width = get_terminal_size().columns
    column = 4 + max(map(len, flags))
    lines = [f"Usage: snugfit {name} [OPTIONS]", ""]
    lines += [*broken(documentation.partition("\n\n")[0], width), ""]
    for flag, text in flags.items():
        lines += broken(f"  {flag:{column - 2}}{text}", width, " " * column)
    lines += ["", "For example:"]
    for example in documentation.split("```")[1].strip().splitlines():
        lines += command_lines("  ", shlex.split(example), width)
    return "\n".join([*lines, "", f"All flags: snugfit {name} {ALL_FLAGS}"])
