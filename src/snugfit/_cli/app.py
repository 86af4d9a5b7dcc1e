"""The command tree, flags from ``--config FILE.yaml``, and the one place where errors become exit codes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from cyclopts import UNSET, App, CoercionError, CycloptsError, Group, MissingArgumentError, Token
from cyclopts.argument import Argument

from snugfit._cli.help_texts import ALL_FLAGS, CLUSTER_HELP, HELP, command_help, overview, summary
from snugfit._cli.output import show_error
from snugfit._cli.startup import ReaderGoneError, die_with_agent, ignore_signals, raise_at_signals
from snugfit._core.options import checked, read
from snugfit._version import __version__
from snugfit.errors import SnugfitError, UnknownNameError, UsageError

BROKEN_PIPE = 141
"""128 + SIGPIPE, as for every tool whose reader went away."""

_FINISHED = "snugfit._cli.finished_runs"
COMMAND_GROUPS = {
    "Before training": {
        "plan": "snugfit._cli.plan:plan",
        "estimate": "snugfit._cli.estimate:estimate",
        "profile": "snugfit._cli.profile:profile",
    },
    "Training": {"train": "snugfit._cli.train:train"},
    "Finished runs": {
        "evaluate": f"{_FINISHED}:evaluate",
        "predict": f"{_FINISHED}:predict",
        "report": f"{_FINISHED}:report",
        "export": f"{_FINISHED}:export",
        "verify": f"{_FINISHED}:verify",
    },
}
"""Functions by command, in the groups of the help. A module is imported when the command line names the command."""
COMMANDS = {name: path for commands in COMMAND_GROUPS.values() for name, path in commands.items()}
LATER = ("profile", "verify")
"""Commands that the short help of all leaves out."""
_SHORT_HELP_FLAGS = ("--help", "-h")
_HELP_FLAGS = (*_SHORT_HELP_FLAGS, ALL_FLAGS)

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


def build(tokens: Sequence[str] = ()) -> App:
    """Return the command tree; the commands among the tokens have their whole help texts, the others a summary."""
    app = App(
        name="snugfit",
        help=HELP,
        help_format="plaintext",
        version=f"snugfit {__version__}",
        version_flags=["--version"],
        help_flags=_HELP_FLAGS,
        config=(apply_config, read_values),
        group_arguments=Group("Arguments", sort_key=0),
        group_commands=Group("Help", sort_key=len(COMMAND_GROUPS)),
    )
    groups = {title: Group(title, sort_key=order) for order, title in enumerate(COMMAND_GROUPS)}
    for title, commands in COMMAND_GROUPS.items():
        _add(app, commands, tokens, groups[title])
    cluster = App(
        name="cluster",
        help=CLUSTER_HELP,
        help_format="plaintext",
        help_flags=_HELP_FLAGS,
        group=groups["Training"],
        sort_key=9,
    )
    _add(cluster, CLUSTER_COMMANDS, tokens if "cluster" in tokens else ())
    app.command(cluster)
    return app


def _add(app: App, commands: Mapping[str, str], tokens: Sequence[str], group: Group | None = None) -> None:
    """Add commands; those among the tokens with their functions."""
    for order, (name, path) in enumerate(commands.items()):
        options: dict[str, Any] = {"name": name, "group": group, "sort_key": order, "help_format": "markdown"}
        if name in tokens:
            app.command(_function(path), help_flags=_HELP_FLAGS, **options)
        else:
            app.command(path, help=summary(path), **options)


def _function(path: str) -> Any:
    """The function of a command, from ``module:function``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def run(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error has been shown by then.

    Raises:
        ReaderGoneError: the reader of stdout went away.
    """
    flags = list(tokens)[: tokens.index("--")] if "--" in tokens else list(tokens)
    as_json, debug = "--json" in flags, "--debug" in flags
    try:
        _require_working_folder()
        short = _short_help(flags)
        if short is not None:
            print(short)
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


def _short_help(flags: Sequence[str]) -> str | None:
    """The short help that a command line asks for; None if it asks for something else."""
    program, text, commands, words = "snugfit", HELP, COMMANDS, [*flags]
    if words[:1] == ["cluster"]:
        program, text, commands, words = "snugfit cluster", CLUSTER_HELP, CLUSTER_COMMANDS, words[1:]
    asked = not {*_SHORT_HELP_FLAGS}.isdisjoint(words) and ALL_FLAGS not in words
    if asked and words[0] in commands:
        return command_help(f"{program} {words[0]}", _function(commands[words[0]]))
    if {*words} <= {*_SHORT_HELP_FLAGS}:
        return overview(program, text, {name: summary(commands[name]) for name in commands if name not in LATER})
    return None


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
    return UsageError(f"{lines}\n`{' '.join(('snugfit', *chain, ALL_FLAGS))}` lists the options.")


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
