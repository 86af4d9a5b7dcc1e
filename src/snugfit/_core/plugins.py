"""Registries of names in modules of a package and in entry points of installed packages."""

from __future__ import annotations

import ast
import importlib
import warnings
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plugins:
    """Objects by name, from dictionaries in modules of snugfit and from installed packages.

    Attributes:
        package: package whose modules declare objects in a dictionary at module level, ``{"name": object}``.
        variable: name of that dictionary.
        group: group of entry points; the name of an entry point is the name of its object.
    """

    package: str
    variable: str
    group: str

    def names(self) -> tuple[str, ...]:
        """All names, without imports, which may take seconds."""
        return tuple(dict.fromkeys([*self._declared(), *(point.name for point in entry_points(group=self.group))]))

    def load_all(self) -> dict[str, Any]:
        """All objects by name; a failed import is skipped with a warning."""
        found = {name: self._imported(module)[name] for name, module in self._declared().items()}
        for point in entry_points(group=self.group):
            thing = load_entry_point(point)
            if thing is not None:
                found[point.name] = thing
        return found

    def _imported(self, module: str) -> dict[str, Any]:
        return dict(getattr(importlib.import_module(f"{self.package}.{module}"), self.variable))

    def _declared(self) -> dict[str, str]:
        """Module of each name, from the source files."""
        spec = find_spec(self.package)
        folders = (spec and spec.submodule_search_locations) or ()
        files = sorted(path for folder in folders for path in Path(folder).glob("*.py"))
        return {name: file.stem for file in files for name in _keys(file, self.variable)}


def _keys(file: Path, variable: str) -> list[str]:
    """Keys of a dictionary that a module assigns at top level; empty without it."""
    text = file.read_text(encoding="utf-8")
    if variable not in text:
        return []
    for statement in ast.parse(text).body:
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        if [getattr(target, "id", "") for target in targets] == [variable]:
            value = getattr(statement, "value", None)
            keys = value.keys if isinstance(value, ast.Dict) else []
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
    groups = ("snugfit.strategies", LOCAL_LOSSES.group, MODELS.group)
    return any(entry_points(group=group) for group in groups)


MODELS = Plugins("snugfit._models", "MODELS", "snugfit.models")
"""Networks: functions of the number of classes, the image's side in pixels and its channels that return a module."""
LOCAL_LOSSES = Plugins("snugfit.local", "LOSSES", "snugfit.local_losses")
"""Local losses: functions of a :class:`~snugfit.local.UnitShape` and :class:`~snugfit.local.NetworkStats`."""
