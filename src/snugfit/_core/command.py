"""The command that trains by the choice of a plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from snugfit._core.option_groups import FROM_PYTHON
from snugfit._core.plan import Plan
from snugfit._core.registry import find_config
from snugfit._core.request import Request


def command_of(request: Request, plan: Plan) -> tuple[str, ...] | None:
    """Arguments of the command that trains by a plan's choice: the request's flags, and the strategy by name.

    If the choice uses several processes, the command starts with ``snugfit cluster launch``.

    Returns:
        None if nothing was chosen, or if model or data were passed from Python.
    """
    choice = plan.choice
    if choice is None or FROM_PYTHON in (request.model.model, request.data.data):
        return None
    training = request.training
    config = find_config(choice.strategy)
    if request.strategy.strategy == "auto" and training.optimizer is None and config and config.default_optimizer:
        # a named strategy may have its own default optimizer, but the plan used the common one
        request = replace(request, training=replace(training, optimizer=plan.workload.optimizer.name))
    request = replace(request, strategy=replace(request.strategy, strategy=choice.strategy))
    processes = int(choice.settings.get("processes", 1))
    start = ("cluster", "launch", "--processes", str(processes), "--") if processes > 1 else ()
    return ("snugfit", *start, "train", *flags_of(request))


def flags_of(request: Request) -> tuple[str, ...]:
    """The flags of a request, without those at their defaults."""
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


def shell_line(command: Sequence[str]) -> str:
    """The command as a line for a shell."""
    return shlex.join(command)
