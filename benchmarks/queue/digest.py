"""Which sources a row depends on.

A digest covers the files of src/snugfit that the strategy reaches by import, the models, and how images are split,
batched and transformed, and what makes first weights or reads them (:data:`FIRST`). It leaves out comments, docstrings
and positions, and the packages of :data:`NEUTRAL`, which predict, bound, measure and show a run. These decide one thing
that training depends on: the batch sizes and tensors that a plan chooses within a budget, which stand in the record.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from benchmarks.common import ROOT

SOURCE = ROOT / "src"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SHARED = ("snugfit._models", "snugfit._data.batches", "snugfit._data.split", "snugfit._data.transform")
NEUTRAL = (
    "snugfit._api", "snugfit._cli", "snugfit._engine", "snugfit.detection", "snugfit.errors", "snugfit.memory",
    "snugfit._planner", "snugfit.profiling", "snugfit._quantities", "snugfit._report", "snugfit._training.launch",
)  # fmt: skip

FIRST = ("snugfit._engine.builder", "snugfit._training.initial_weights", "snugfit._storage.tensor_file")
"""Without what they import: they make the weights that training begins with."""


def digest_of(strategy: str, source: Path = SOURCE) -> str:
    """Digest of the sources behind a run of a strategy."""
    total = hashlib.sha256()
    for module in [*reached([f"snugfit.strategies.{strategy}", *SHARED], source), *FIRST]:
        total.update(f"{module} {_of_file(_file(module, source))}\n".encode())
    return total.hexdigest()[:16]


def reached(roots: list[str], source: Path = SOURCE) -> list[str]:
    """Modules of ``snugfit`` that ``roots`` import, directly or not, and they themselves; sorted."""
    found: set[str] = set()
    ahead = list(roots)
    while ahead:
        module = ahead.pop()
        if module in found or any(module == each or module.startswith(each + ".") for each in NEUTRAL):
            continue
        found.add(module)
        ahead += _imports(_file(module, source), source)
        ahead += [module.rpartition(".")[0]] if "." in module else []
    return sorted(found - {"snugfit"})


def _file(module: str, source: Path) -> Path:
    path = source.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imports(path: Path, source: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(_tree(path, path.stat().st_mtime_ns)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.startswith("snugfit.") and _file(name, source).is_file()]


@cache
def _tree(path: Path, changed: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _of_file(path: Path) -> str:
    return _digest(path, path.stat().st_mtime_ns)


@cache
def _digest(path: Path, changed: int) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
