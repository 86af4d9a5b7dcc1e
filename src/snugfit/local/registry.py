"""The local losses by name: those that modules of this package declare, and those of installed packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from snugfit._core import known, registry
from snugfit.errors import UnknownNameError, UsageError
from snugfit.local.base import LocalLoss, NetworkStats, UnitShape

LOCAL_LOSSES: dict[str, Callable[..., LocalLoss]] = registry.LOCAL_LOSSES.load_all()
"""Functions that make a local loss for a unit, by name; another one can be added while a program runs."""


def build_local_loss(text: str, unit: UnitShape, network: NetworkStats) -> LocalLoss:
    """Build a local loss for one unit, on the current default device.

    Args:
        text: its name, optionally with its own options: ``lls``, or ``lls:basis=cosine,mode=paper``.
        unit, network: statistics of the unit and its network.

    Raises:
        UnknownNameError: there is no local loss or option of that name.
        UsageError: an option cannot be read, or has an invalid value.
    """
    known.check_local_loss(text, LOCAL_LOSSES)
    name, _, rest = text.partition(":")
    make = LOCAL_LOSSES[name]
    defaults = _options(make)
    options = {}
    for item in filter(None, rest.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if not defaults:
            raise UsageError(f"the local loss {name} has no options; remove '{item}'.")
        if key not in defaults:
            raise UnknownNameError(f"option of the local loss {name}", key, defaults)
        if key in options:
            raise UsageError(f"the option {key} of the local loss {name} is given twice.")
        options[key] = _read(item, value, defaults[key])
    return make(unit, network, **options)


def check_local_loss(text: str) -> None:
    """Raise the errors of :func:`build_local_loss` before there is a network."""
    build_local_loss(text, UnitShape((1, 1, 1)), NetworkStats(1, 1, 2))


def _options(make: Callable[..., LocalLoss]) -> dict[str, Any]:
    """A local loss's options and their defaults: its keyword-only arguments."""
    parameters = inspect.signature(make).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _read(item: str, value: str, default: Any) -> Any:
    """An option's value, of the type of its default."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        return type(default)(value)
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"'{item}' cannot be read; write it like {item.partition('=')[0]}={str(default).lower()}."
        ) from error
