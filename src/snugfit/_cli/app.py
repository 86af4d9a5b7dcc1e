"""The command tree, flags from ``--config FILE.yaml``, and the one place where errors become exit codes."""

from __future__ import annotations

import ast
import contextlib
import inspect
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NoReturn

from cyclopts import UNSET, App, CoercionError, CycloptsError, Group, MissingArgumentError, Token
from cyclopts.argument import Argument

from snugfit._cli.output import show_error
from snugfit._cli.startup import ReaderGoneError, die_with_agent, ignore_signals, raise_at_signals
from snugfit._core.options import checked, common_options, read
from snugfit._report.wrapping import broken, command_lines
from snugfit._version import __version__
from snugfit.errors import SnugfitError, UnknownNameError, UsageError

ALL_FLAGS = "--help-all"
BROKEN_PIPE = 141
"""128 + SIGPIPE, as for every tool whose reader went away."""

_FINISHED = "snugfit._cli.finished_runs"
COMMANDS = {
    "plan": "snugfit._cli.plan:plan",
    "train": "snugfit._cli.train:train",
    "evaluate": f"{_FINISHED}:evaluate",
    "predict": f"{_FINISHED}:predict",
    "profile": "snugfit._cli.profile:profile",
    "estimate": "snugfit._cli.estimate:estimate",
    "report": f"{_FINISHED}:report",
    "export": f"{_FINISHED}:export",
    "verify": f"{_FINISHED}:verify",
}
"""Functions by command. A module is imported when the command line names the command."""
SHORT_HELP = ("plan", "train", "profile", "estimate")
"""Commands whose ``--help`` shows the most used flags, and ``--help-all`` all of them."""
_HELP_FLAGS = ("--help", "-h", ALL_FLAGS)

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
Train on several processes or hosts at once, and measure their network and processors.

How fast are the hosts, and the links between them?

    snugfit cluster doctor --hosts cluster.yaml --out cluster.json

How would a network be cut into tiles over them, and what would a step take?

    snugfit cluster plan --cluster cluster.json --model yolov2_16 --image-size 608

Train over all of them; rank 0, on the first host, has the data and writes the run folder:

    snugfit cluster launch --hosts cluster.yaml -- train --strategy tiled --model vgg16

Traffic is neither encrypted nor authenticated: for networks that you trust.
"""
CLUSTER_COMMANDS = {
    "launch": "snugfit._cli.launch:launch",
    "doctor": "snugfit._cli.doctor:doctor",
    "plan": "snugfit._cli.tiles:plan_cluster",
}


def read_config(path: str) -> dict[str, Any]:
    """Read a flat YAML mapping of option names (``batch_size`` or ``batch-size``) to single values, by kebab-case name.

    Raises:
        UsageError: the file cannot be read, is not a flat mapping, or names an option twice.
    """
    from snugfit._core.yaml_text import read_yaml  # commands without --config have no use for YAML

    content = read_yaml(path, UsageError, "--config takes lines like 'epochs: 10'.", numbers=False)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"the config file {path} must hold lines like 'epochs: 10', not a {type(content).__name__}.")
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name in options:
            raise UsageError(f"'{name}' appears twice in the config file {path}; keep one.")
        if isinstance(value, (dict, list)):
            raise UsageError(f"'{key}' in the config file {path} must be a single value, not a {type(value).__name__}.")
        options[name] = value
    return options


def apply_config(app: Any, commands: tuple[str, ...], arguments: Iterable[Argument]) -> None:
    """Fill the arguments that are not on the command line from the file of ``--config``: a cyclopts config source.

    Raises:
        UsageError: the file is unusable, or a value does not fit its option.
        UnknownNameError: the file names an option that this command does not have.
    """
    flags = {n.removeprefix("--"): argument for argument in arguments for n in argument.names if n.startswith("--")}
    config = flags.pop("config", None)
    if config is None or not config.tokens:
        return
    given = {id(argument) for argument in flags.values() if argument.tokens}
    path = config.tokens[-1].value
    for name, value in read_config(path).items():
        if name not in flags:
            raise UnknownNameError("option", name, flags)
        if value is not None and id(flags[name]) not in given:
            try:
                _fill(flags[name], name, value)
            except UsageError as error:
                error.args = (f"{error}\nIt is in the config file {path}.",)
                raise


def _fill(argument: Argument, name: str, value: Any) -> None:
    """Give an argument a value of the file: text is read as on the command line, true and false are kept."""
    if not isinstance(value, bool):
        value = read(argument.field_info.annotation, str(value))
    value = checked(name, argument.field_info.annotation, value)
    if f"--{name}" in argument.negatives:
        value = not value
    argument.append(Token(keyword=f"--{name}", implicit_value=value))


def read_values(app: Any, commands: tuple[str, ...], arguments: Iterable[Argument]) -> None:
    """Read the values of all flags by the declarations of their options, before cyclopts reads them by type alone.

    Raises:
        UsageError: a value does not fit its option.
    """
    for argument in arguments:
        for number, token in enumerate(argument.tokens):
            if token.keyword and token.implicit_value is UNSET:
                value = read_value(argument, token.value)
                argument.tokens[number] = token.evolve(implicit_value=value)


def read_value(argument: Argument, text: str) -> Any:
    """The value that text gives an argument; raises UsageError if it does not fit."""
    hint, name = argument.field_info.annotation, argument.names[0].removeprefix("--")
    return checked(name, hint, read(hint, text))


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


def build(tokens: Sequence[str] = ()) -> App:
    """Return the command tree; the commands among the tokens have their whole help texts, the others a summary."""
    app = App(
        name="snugfit",
        help=HELP,
        help_format="plaintext",
        version=f"snugfit {__version__}",
        version_flags=["--version"],
        config=(apply_config, read_values),
        group_arguments=Group("Arguments", sort_key=0),
    )
    _add(app, COMMANDS, tokens)
    cluster = App(name="cluster", help=CLUSTER_HELP, help_format="plaintext", sort_key=len(COMMANDS))
    _add(cluster, CLUSTER_COMMANDS, tokens if "cluster" in tokens else ())
    app.command(cluster)
    return app


def _add(app: App, commands: Mapping[str, str], tokens: Sequence[str]) -> None:
    for order, (name, path) in enumerate(commands.items()):
        module, _, function = path.partition(":")
        if name in tokens:
            app.command(_function(path), name=name, sort_key=order, help_format="markdown", help_flags=_HELP_FLAGS)
        else:
            app.command(path, name=name, help=_summaries(module)[function], sort_key=order, help_format="markdown")


def _function(path: str) -> Any:
    """The function of a command, from ``module:function``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@cache
def _summaries(module: str) -> dict[str, str]:
    """First paragraph of each function's docstring, read without an import."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    functions = (each for each in ast.parse(Path(spec.origin).read_bytes()).body if isinstance(each, ast.FunctionDef))
    docstrings = {each.name: ast.get_docstring(each) or "" for each in functions}
    return {name: " ".join(text.partition("\n\n")[0].split()) for name, text in docstrings.items()}


def run(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error has been shown by then.

    Raises:
        ReaderGoneError: the reader of stdout went away.
    """
    flags = list(tokens)[: tokens.index("--")] if "--" in tokens else list(tokens)
    as_json, debug = "--json" in flags, "--debug" in flags
    try:
        _require_working_folder()
        if flags[:1] and flags[0] in SHORT_HELP and not {"--help", "-h"}.isdisjoint(flags) and ALL_FLAGS not in flags:
            print(short_help(flags[0], _function(COMMANDS[flags[0]])))
            sys.stdout.flush()
            return 0
        command, bound, _ = build(tokens).parse_args(list(tokens), exit_on_error=False, print_error=False)
        output = bound.arguments.get("output")
        as_json, debug = (output.json, output.debug) if output is not None else (False, False)
        code = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except ReaderGoneError:
        raise
    except CycloptsError as error:
        return show_error(_usage_error(error), as_json=as_json, debug=debug)
    except (Exception, KeyboardInterrupt) as error:
        return show_error(error, as_json=as_json, debug=debug)


def _require_working_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError("the working folder no longer exists; change to another one.") from error


def _usage_error(error: CycloptsError) -> UsageError:
    if isinstance(error, CoercionError) and error.argument is not None and error.token is not None:
        try:
            read_value(error.argument, error.token.value)  # --augment=maybe
        except UsageError as refused:
            return refused
    chain: Any = error.command_chain or ()
    lines = " ".join(str(error).split())
    if isinstance(error, MissingArgumentError) and "Did you mean" not in lines:
        name = error.argument.name if error.argument is not None else "a value"
        lines = f"{error.keyword} needs a value." if error.keyword else f"{' '.join(('snugfit', *chain))} needs {name}."
    flag = ALL_FLAGS if {*chain[:1]} & {*SHORT_HELP} else "--help"
    return UsageError(f"{lines}\n`{' '.join(('snugfit', *chain, flag))}` lists the options.")


def main() -> NoReturn:
    """Run the command of ``sys.argv`` and exit with its code."""
    die_with_agent()
    for name in {*COMMANDS} & {*sys.argv}:  # while a signal still ends the process at once
        import_module(COMMANDS[name].partition(":")[0])
    raise_at_signals()
    try:
        code = run(sys.argv[1:])
    except ReaderGoneError:
        code = BROKEN_PIPE
    ignore_signals()
    with contextlib.suppress(ReaderGoneError, SnugfitError):
        sys.stdout.flush()  # of an error, as JSON
    sys.exit(code)
