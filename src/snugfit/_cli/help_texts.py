"""Help in two levels: what a beginner needs, here; and everything by group, which cyclopts prints."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from snugfit._core.options import common_options
from snugfit._report.wrapping import broken, command_lines

ALL_FLAGS = "--help-all"
"""Flag of the second level."""

HELP = """\
Train CNNs inside a memory budget that is predicted, enforced and verified.

What fits into 100 MB on this machine, and what does it cost?

    snugfit plan --model vgg16 --data digits --memory 100MB

How much memory does a training step need, and why?

    snugfit estimate --model resnet18 --input-shape 3x224x224 --classes 100

Train with the best strategy that fits, and never use more:

    snugfit train --model vgg16 --data digits --memory 100MB --out runs/first

Classify a folder of images with the model that came out:

    snugfit predict runs/first photos/ --out classes.csv
"""


CLUSTER_HELP = """\
Train on several processes or trusted hosts at once, and measure their network and processors.

How fast are the hosts, and the links between them?

    snugfit cluster doctor --hosts cluster.yaml --out cluster.json

How would a network be cut into tiles over them, and what would a step take?

    snugfit cluster plan --cluster cluster.json --model vgg16 --image-size 224

Train over all of them; rank 0, on the first host, has the data and writes the run folder:

    snugfit cluster launch --hosts cluster.yaml -- train --strategy tiled

Traffic is neither encrypted nor authenticated: for networks that you trust.
"""


def overview(program: str, text: str, summaries: Mapping[str, str]) -> str:
    """The short help of several commands: the first words of their summaries, and the examples of a help text."""
    texts = {name: re.split("[,;:]", summary)[0].rstrip(".") for name, summary in summaries.items()}
    examples = [line.strip() for line in text.splitlines() if line.startswith("    snugfit")]
    lines = _sections(f"{program} COMMAND [OPTIONS]", text.splitlines()[0], texts, examples)
    more = f"Flags of a command: {program} COMMAND --help", f"All commands: {program} {ALL_FLAGS}"
    return "\n".join([*lines, "", *more])


def command_help(program: str, function: Callable[..., Any]) -> str:
    """Usage, summary, the options marked as :class:`~snugfit._core.options.Common`, and the docstring's examples."""
    hints = typing.get_type_hints(function, include_extras=True)
    kinds = inspect.signature(function).parameters.values()
    places = {each.name: each.name.upper() for each in kinds if each.kind is inspect.Parameter.POSITIONAL_ONLY}
    rest = {each.name: f"-- {each.name.upper()}" for each in kinds if each.kind is inspect.Parameter.VAR_POSITIONAL}
    named = places | rest
    parameters = [each for each in hints.items() if each[0] != "return"]
    found = [mark for each in parameters for mark in common_options(*each)]
    name = program.removeprefix("snugfit ")
    marked = [(option, mark) for option, mark in found if name in (mark.commands or (name,))]
    flags = {
        named.get(option, f"--{option.replace('_', '-')} {mark.value}".strip()): mark.text for option, mark in marked
    }
    documentation = inspect.cleandoc(function.__doc__ or "")
    usage = " ".join([program, *places.values(), "[OPTIONS]", *rest.values()])
    examples = documentation.split("```")[1].strip().splitlines()
    lines = [*_sections(usage, documentation.partition("\n\n")[0], flags, examples), ""]
    return "\n".join([*lines, f"All flags: {program} {ALL_FLAGS}"])


def _sections(usage: str, says: str, rows: Mapping[str, str], examples: list[str]) -> Iterator[str]:
    """Usage, what it is, rows in two columns, and examples, in lines of the terminal's width."""
    width = get_terminal_size().columns
    column = 4 + max(map(len, rows))
    yield from (f"Usage: {usage}", "", *broken(says, width), "")
    for row, text in rows.items():
        yield from broken(f"  {row:{column - 2}}{text}", width, " " * column)
    yield from ("", "For example:")
    for example in examples:
        yield from command_lines("  ", shlex.split(example), width)


def summary(path: str) -> str:
    """First paragraph of the docstring of a command's ``module:function``, read without an import."""
    module, _, function = path.partition(":")
    return _summaries(module)[function]


@cache
def _summaries(module: str) -> dict[str, str]:
    """First paragraph of each function's docstring."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    functions = (each for each in ast.parse(Path(spec.origin).read_bytes()).body if isinstance(each, ast.FunctionDef))
    docstrings = {each.name: ast.get_docstring(each) or "" for each in functions}
    return {name: " ".join(text.partition("\n\n")[0].split()) for name, text in docstrings.items()}
