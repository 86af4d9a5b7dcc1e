"""The command tree, and the one place where errors become exit codes."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from cyclopts import App, CoercionError, CycloptsError, Group

from snugfit._cli.config import apply_config, read_value, read_values
from snugfit._cli.output import show_error
from snugfit._cli.short_help import ALL_FLAGS, short_help
from snugfit._cli.startup import ReaderGoneError, die_with_agent, ignore_signals, raise_at_signals
from snugfit._version import __version__
from snugfit.errors import SnugfitError, UsageError

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
