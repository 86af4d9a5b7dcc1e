"""The command tree, and the one place where errors become exit codes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cyclopts import App, CoercionError, CycloptsError, Group

from snugfit._cli.config import apply_config, read_value, read_values
from snugfit._cli.doctor import doctor
from snugfit._cli.finished_runs import evaluate, export, predict, report, verify
from snugfit._cli.launch import launch
from snugfit._cli.options import OutputOptions
from snugfit._cli.output import show_error
from snugfit._cli.plan import plan
from snugfit._cli.profile import profile
from snugfit._cli.startup import ReaderGoneError, die_with_agent, ignore_signals, raise_at_signals
from snugfit._cli.tiles import plan_cluster
from snugfit._cli.train import train
from snugfit._version import __version__
from snugfit.errors import SnugfitError, UsageError

BROKEN_PIPE = 141
"""128 + SIGPIPE, as for every tool whose reader went away."""

COMMANDS: tuple[Callable[..., Any], ...] = (plan, train, evaluate, predict, profile, report, export, verify)

HELP = """\
Train CNNs inside a memory budget that is predicted, enforced and verified.

What fits into 100 MB on this machine, and what does it cost?

    snugfit plan --model vgg16 --data digits --memory 100MB

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
CLUSTER_COMMANDS: dict[str, Callable[..., int | None]] = {"launch": launch, "doctor": doctor, "plan": plan_cluster}


def build() -> App:
    """Return the command tree."""
    app = App(
        name="snugfit",
        help=HELP,
        help_format="plaintext",
        version=f"snugfit {__version__}",
        version_flags=["--version"],
        config=(apply_config, read_values),
        group_arguments=Group("Arguments", sort_key=0),
    )
    for order, command in enumerate(COMMANDS):
        app.command(command, sort_key=order, help_format="markdown")
    cluster = App(name="cluster", help=CLUSTER_HELP, help_format="plaintext", sort_key=len(COMMANDS))
    for order, (name, one) in enumerate(CLUSTER_COMMANDS.items()):
        cluster.command(one, name=name, sort_key=order, help_format="markdown")
    app.command(cluster)
    return app


def run(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error has been shown by then.

    Raises:
        ReaderGoneError: the reader of stdout went away.
    """
    flags = list(tokens)[: tokens.index("--")] if "--" in tokens else list(tokens)
    as_json, debug = "--json" in flags, "--debug" in flags
    try:
        _require_working_folder()
        command, bound, _ = build().parse_args(list(tokens), exit_on_error=False, print_error=False)
        output = bound.arguments.get("output", OutputOptions())
        as_json, debug = output.json, output.debug
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
    return UsageError(f"{lines}\n`{' '.join(('snugfit', *chain))} --help` lists the options.")


def main() -> NoReturn:
    """Run the command of ``sys.argv`` and exit with its code."""
    die_with_agent()
    raise_at_signals()
    try:
        code = run(sys.argv[1:])
    except ReaderGoneError:
        code = BROKEN_PIPE
    ignore_signals()
    with contextlib.suppress(ReaderGoneError, SnugfitError):
        sys.stdout.flush()  # of an error, as JSON
    sys.exit(code)
