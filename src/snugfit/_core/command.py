"""The command line that runs the choice of a plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from snugfit._core.option_groups import OWN
from snugfit._core.plan import Plan
from snugfit._core.registry import find_config
from snugfit._core.request import Request


def command_of(request: Request, plan: Plan) -> tuple[str, ...] | None:
    """Arguments of the command that trains by a plan's choice: the request's flags, and the strategy by name.

    Where the choice runs over several processes, it is theirs: ``snugfit cluster launch``.

    Returns:
        None where nothing was chosen, or where model or data came from Python.
    """
    choice = plan.choice
    if choice is None or OWN in (request.model.model, request.data.data):
        return None
    training = request.training
    config = find_config(choice.strategy)
    if request.strategy.strategy == "auto" and training.optimizer is None and config and config.default_optimizer:
        # named, the strategy has a default optimizer of its own, but this was planned with the common one
        request = replace(request, training=replace(training, optimizer=plan.workload.optimizer.name))
    request = replace(request, strategy=replace(request.strategy, strategy=choice.strategy))
    processes = int(choice.settings.get("processes", 1))
    start = ("cluster", "launch", "--processes", str(processes), "--") if processes > 1 else ()
    return ("snugfit", *start, "train", *flags_of(request))


def flags_of(request: Request) -> tuple[str, ...]:
    """The flags that make a request, without those that say what holds anyway."""
    flags: list[str] = []
    for group in fields(request):
        given = getattr(request, group.name)
        for option in fields(given):
            value = getattr(given, option.name)
            if value != option.default:
                flags += _flag(option.name.replace("_", "-"), value)
    return tuple(flags)


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def as_typed(command: Sequence[str]) -> str:
    """The command as one types it into a shell."""
    return shlex.join(command)
