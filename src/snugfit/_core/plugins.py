"""Names that modules of a package declare, and that installed packages add through entry points."""

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
    """Things by name: those in a dictionary of a module of snugfit's own, and those of installed packages.

    Attributes:
        package: package whose modules declare them, each in a dictionary at module level, ``{"name": thing}``.
        variable: name of that dictionary.
        group: group of entry points; the name of an entry point is the name of the thing.
    """

    package: str
    variable: str
    group: str

    def names(self) -> tuple[str, ...]:
        """All names; nothing is imported, since that may take seconds."""
        return tuple(dict.fromkeys([*self._declared(), *(point.name for point in entry_points(group=self.group))]))

    def load_all(self) -> dict[str, Any]:
        """All things by name; one whose package cannot be imported is left out with a warning."""
        found = {name: self._imported(module)[name] for name, module in self._declared().items()}
        for point in entry_points(group=self.group):
            thing = loaded(point)
            if thing is not None:
                found[point.name] = thing
        return found

    def _imported(self, module: str) -> dict[str, Any]:
        return dict(getattr(importlib.import_module(f"{self.package}.{module}"), self.variable))

    def _declared(self) -> dict[str, str]:
        """Module of each name, as the files say."""
        spec = find_spec(self.package)
        folders = (spec and spec.submodule_search_locations) or ()
        files = sorted(path for folder in folders for path in Path(folder).glob("*.py"))
        return {name: file.stem for file in files for name in _keys(file, self.variable)}


def _keys(file: Path, variable: str) -> list[str]:
    """Keys of a dictionary that a module assigns at its top level; none where it does not."""
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


def loaded(point: EntryPoint) -> Any:
    """What an entry point refers to; None, with a warning, where its package cannot be imported."""
    try:
        return point.load()
    except Exception as error:
        name = point.dist.name if point.dist else point.value
        warnings.warn(f"{point.group}: '{point.name}' of the package {name} cannot be loaded: {error}", stacklevel=2)
        return None


MODELS = Plugins("snugfit._models", "MODELS", "snugfit.models")
"""Networks: functions of the number of classes, the image's side in pixels and its channels that return a module."""
LOCAL_LOSSES = Plugins("snugfit.local", "LOSSES", "snugfit.local_losses")
"""Local losses: functions of a :class:`~snugfit.local.UnitShape` and :class:`~snugfit.local.NetworkFacts`."""
