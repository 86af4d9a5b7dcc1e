"""Strategies by name: those in the folder ``snugfit/strategies``, and those of installed packages.

A strategy is a package with a ``config.py`` that defines a class ``Config``, a
:class:`~snugfit._core.strategy_config.StrategyConfig`. An installed package adds one with an entry point in the group
``snugfit.strategies`` that refers to such a class.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from snugfit._core.option_merging import merged_options
from snugfit._core.plugins import load_entry_point
from snugfit._core.strategy_config import StrategyConfig
from snugfit.errors import UnknownNameError

GROUP = "snugfit.strategies"
"""Group of entry points, and the package with snugfit's own strategies."""


@functools.cache
def strategies() -> dict[str, StrategyConfig]:
    """All strategies by name, in table order; a failing entry point is skipped with a warning."""
    found = {config.name: config for config in _own()}
    for point in entry_points(group=GROUP):
        kind = load_entry_point(point)
        reason = None if kind is None else _why_unusable(kind, found)
        if reason is not None:
            warnings.warn(f"{GROUP}: '{point.name}' is left out: {reason}", stacklevel=2)
        elif kind is not None:
            found[kind.name] = kind()
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[0])))


def _own() -> Iterator[StrategyConfig]:
    package = importlib.import_module(GROUP)
    for each in pkgutil.iter_modules(package.__path__):
        if each.ispkg and any(Path(path, each.name, "config.py").exists() for path in package.__path__):
            yield importlib.import_module(f"{GROUP}.{each.name}.config").Config()


def _why_unusable(kind: Any, found: dict[str, StrategyConfig]) -> str | None:
    """Why a config of an installed package cannot be used next to those that were found; None if it can."""
    if not (isinstance(kind, type) and issubclass(kind, StrategyConfig)):
        return "it is not a class derived from StrategyConfig"
    try:
        if kind.name in found:
            return f"there is a strategy {kind.name} already"
        merged_options([*(config.options for config in found.values()), kind.options])
        kind()
    except (TypeError, AttributeError, NameError) as error:
        return str(error)
    return None


def import_strategies() -> None:
    """Import the modules of all strategies; one of an installed package that fails is left out with a warning.

    Raises:
        ImportError: a module of snugfit's own strategies fails.
    """
    for name, config in list(strategies().items()):
        try:
            strategy_class(name)
        except Exception as error:
            if config.implementation.startswith(f"{GROUP}."):
                raise
            del strategies()[name]
            warnings.warn(f"the strategy {name} is left out, since it cannot be imported: {error}", stacklevel=2)


def find_config(name: str) -> StrategyConfig | None:
    """The config of a strategy; None if there is no such strategy."""
    return strategies().get(name)


def config_of(name: str) -> StrategyConfig:
    """The config of a strategy.

    Raises:
        UnknownNameError: there is no strategy of that name.
    """
    if name not in strategies():
        raise UnknownNameError("strategy", name, strategies())
    return strategies()[name]


def strategy_class(name: str) -> Any:
    """The strategy's dataclass; imports torch.

    Raises:
        UnknownNameError: there is no strategy of that name.
    """
    return import_reference(config_of(name).implementation)


def import_reference(reference: str) -> Callable[..., Any]:
    """Import the class or function of a reference like ``package.module:name``."""
    module, _, attribute = reference.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found
