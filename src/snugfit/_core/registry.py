"""Strategies, models and local losses by name: snugfit's own, and those of installed packages."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from snugfit._core.option_groups import BaseRequest
from snugfit._core.options import ANY_STRATEGY, EXACT
from snugfit._core.strategy_config import StrategyConfig, merged_options
from snugfit.errors import UnknownNameError

GROUP = "snugfit.strategies"
"""Group of entry points for classes derived from StrategyConfig, and the package with snugfit's own strategies."""


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


def considered(request: BaseRequest) -> list[StrategyConfig]:
    """The strategy that a request names, or those that serve it if it names none."""
    name = request.strategy.strategy
    if name not in ANY_STRATEGY:
        return [config_of(name)]
    return [config for config in strategies().values() if why_not(config, request) is None]


def why_not(config: StrategyConfig, request: BaseRequest) -> str | None:
    """Why a strategy is not considered for a request that names none; None if it is."""
    if request.strategy.strategy == EXACT and not config.exact:
        return "its gradients are not exact"
    return config.why_not(request)


def import_strategies(request: BaseRequest) -> None:
    """Import the modules of the strategies that a request considers.

    A strategy of an installed package that fails is left out with a warning.
    """
    for config in considered(request):
        try:
            for module in (config.implementation.partition(":")[0], *config.modules(request)):
                importlib.import_module(module)
            strategy_class(config.name)
        except Exception as error:
            if config.implementation.startswith(f"{GROUP}."):
                raise
            del strategies()[config.name]
            warnings.warn(f"the strategy {config.name} is left out, since it cannot be imported: {error}", stacklevel=2)


def find_config(name: str) -> StrategyConfig:
    """The config of a strategy; that of a strategy without particulars if there is none of that name."""
    return strategies().get(name) or StrategyConfig()


def config_of(name: str) -> StrategyConfig:
    """The config of a strategy; raises UnknownNameError if there is none."""
    if name not in strategies():
        raise UnknownNameError("strategy", name, strategies())
    return strategies()[name]


def strategy_class(name: str) -> Any:
    """The strategy's dataclass; imports torch."""
    return pkgutil.resolve_name(config_of(name).implementation)


@dataclass(frozen=True)
class Plugins:
    """Objects by name, from modules of snugfit and from entry points of installed packages.

    Modules of ``package`` declare objects in a dictionary at module level, ``{"name": object}``, whose name is
    ``variable``. Entry points of the ``group`` have the names of their objects.
    """

    package: str
    variable: str
    group: str

    def names(self) -> tuple[str, ...]:
        """All names, without imports, which may take seconds."""
        return tuple(dict.fromkeys([*self._declared(), *(point.name for point in entry_points(group=self.group))]))

    def load(self, name: str) -> Any:
        """The object of a name; None if the import fails, with a warning, or if there is none."""
        if name in (declared := self._declared()):
            return getattr(importlib.import_module(f"{self.package}.{declared[name]}"), self.variable)[name]
        points = entry_points(group=self.group, name=name)
        return load_entry_point(next(iter(points))) if points else None

    def load_all(self) -> dict[str, Any]:
        """All objects by name; a failed import is skipped with a warning."""
        return {name: thing for name in self.names() if (thing := self.load(name)) is not None}

    def _declared(self) -> dict[str, str]:
        """Module of each name, from the source files."""
        return _modules(self.package, self.variable)


@functools.cache
def _modules(package: str, variable: str) -> dict[str, str]:
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    files = sorted(path for folder in folders for path in Path(folder).glob("*.py"))
    return {name: file.stem for file in files for name in _keys(file, variable)}


def _keys(file: Path, variable: str) -> list[str]:
    """Keys of a dictionary that a module assigns at top level; empty without it."""
    text = file.read_text(encoding="utf-8")
    for statement in ast.parse(text).body if variable in text else ():
        match statement:
            case ast.Assign([ast.Name(name)], ast.Dict(keys)) | ast.AnnAssign(ast.Name(name), _, ast.Dict(keys)):
                if name == variable:
                    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return []


def load_entry_point(point: EntryPoint) -> Any:
    """Load the object of an entry point; return None, with a warning, if the import fails."""
    try:
        return point.load()
    except Exception as error:
        name = point.dist.name if point.dist else point.value
        warnings.warn(f"{point.group}: '{point.name}' of the package {name} cannot be loaded: {error}", stacklevel=2)
        return None


def installed_plugins() -> bool:
    """Whether installed packages add strategies, local losses or models, whose code may change at any time."""
    return any(entry_points(group=group) for group in (GROUP, LOCAL_LOSSES.group, MODELS.group))


MODELS = Plugins("snugfit._models", "MODELS", "snugfit.models")
"""Networks: functions of the number of classes, the image's side in pixels and its channels that return a module."""
LOCAL_LOSSES = Plugins("snugfit.local", "LOSSES", "snugfit.local_losses")
"""Local losses: functions of a :class:`~snugfit.local.UnitShape` and :class:`~snugfit.local.NetworkStats`."""


@functools.cache
def code_digest() -> str:
    """Digest that distinguishes this installation from others of the same version, such as a patched one."""
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    facts = [(str(path.relative_to(root)), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    return sha256(repr(facts).encode()).hexdigest()
