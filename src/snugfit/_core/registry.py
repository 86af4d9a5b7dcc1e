"""Strategies by name: those in the folder ``snugfit/strategies``, and those of installed packages.

A strategy is a package with a ``config.py`` that defines a class ``Config``, a
:class:`~snugfit._core.strategy_config.StrategyConfig`. An installed package adds one with an entry point in the group
``snugfit.strategies`` that refers to such a class.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from snugfit._core.plugins import load_entry_point
from snugfit._core.strategy_config import StrategyConfig
from snugfit.errors import UnknownNameError

GROUP = "snugfit.strategies"
"""Group of entry points, and the package with snugfit's own strategies."""


@functools.cache
def strategies() -> dict[str, StrategyConfig]:
    """All strategies by name, in table order; a failing entry point is skipped with a warning."""
    found = {config.name: config for config in (*_own(), *_installed())}
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[0])))


def _own() -> Iterator[StrategyConfig]:
    package = importlib.import_module(GROUP)
    for each in pkgutil.iter_modules(package.__path__):
        if each.ispkg and any(Path(path, each.name, "config.py").exists() for path in package.__path__):
            yield importlib.import_module(f"{GROUP}.{each.name}.config").Config()


def _installed() -> Iterator[StrategyConfig]:
    for point in entry_points(group=GROUP):
        config = load_entry_point(point)
        if config is not None:
            yield config()


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
