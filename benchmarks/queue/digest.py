"""Which sources a row depends on.

A digest covers the statements of all files in src/snugfit that the strategy and the model reach by import, with data,
batches and transforms, and of those that make or read initial weights (:data:`FIRST`). It leaves out imports, comments,
docstrings, and the names and order of files, so that a statement may move from one file to another. It also leaves out
:data:`NEUTRAL`: what parses, plans, predicts, bounds, measures, stores and shows a run. In a budget they
choose batch sizes, modules and schedules. A row keeps these choices, and its commit tells which planner made them. So a
table can fill over weeks while planners improve.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.common import ROOT

SOURCE = ROOT / "src"
MODELS, STRATEGIES = "snugfit._models", "snugfit.strategies"
SHARED = (MODELS, "snugfit._data.batches", "snugfit._data.split", "snugfit._data.transform")
LOADED_BY_NAME = ("snugfit.local",)
"""Packages whose modules are loaded by the names that they declare, which no import shows."""
NEUTRAL = (
    *(f"snugfit.{name}" for name in ("_api", "_cli", "_engine", "_planner", "_quantities", "_report", "_version")),
    *(f"snugfit.{name}" for name in ("detection", "errors", "memory", "profiling")),
    *(f"snugfit.strategies.{name}" for name in ("memory_estimates", "micro_batch", "backprop.config")),
    *(f"snugfit.strategies.blockwise.{name}" for name in ("blocks", "config", "loss_choice")),
    *(f"snugfit.strategies.blockwise.{name}" for name in ("modules", "probes", "strategy")),
    *(f"snugfit.strategies.checkpoint.{name}" for name in ("candidates", "config")),
    *(f"snugfit.strategies.recomputation.{name}" for name in ("dynamic_program", "unit_costs")),
    *(f"snugfit._core.{name}" for name in ("amounts", "budget", "documents", "explanation", "hardware", "known")),
    *(f"snugfit._core.{name}" for name in ("option_groups", "options", "paths", "plan", "profile", "record")),
    *(f"snugfit._core.{name}" for name in ("registry", "request", "serial", "yaml_text")),
    *(f"snugfit._data.{name}" for name in ("boxed", "boxes", "coco", "download")),
    *(f"snugfit._data.{name}" for name in ("fine_grained", "matlab", "user", "vww", "yolo")),
    *(f"snugfit._storage.{name}" for name in ("checkpoint", "digests", "files", "lock", "manifest")),
    *(f"snugfit._training.{name}" for name in ("dry_run", "events", "launch", "metrics", "run", "stopping")),
)

FIRST = ("snugfit._engine.builder", "snugfit._training.initial_weights", "snugfit._storage.tensor_file")
"""Without what they import: they make the weights that training begins with."""


def digest_of(strategy: str, model: str, source: Path = SOURCE) -> str:
    """Digest of the sources behind a run of a strategy (or a peer's script) on a model."""
    roots, scripts = [*_model(model, source), *SHARED], list[Path]()
    if strategy.startswith("benchmarks."):
        scripts = [source.parent.joinpath(*strategy.split(".")).with_suffix(".py")]
    else:
        roots += _contents(f"{STRATEGIES}.{strategy}", source)
    files = [
        *scripts,
        *(_file(module, source) for module in {*reached(roots, source), *FIRST}),
    ]
    digests = sorted(each for path in files for each in _statements(path, path.stat().st_mtime_ns))
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


def reached(roots: list[str], source: Path = SOURCE) -> list[str]:
    """Modules of ``snugfit`` that ``roots`` import, directly or not, and they themselves; sorted."""
    found, ahead = set[str](), list(roots)
    while ahead:
        module = ahead.pop()
        if module in found or any(module == each or module.startswith(each + ".") for each in NEUTRAL):
            continue
        found.add(module)
        path = _file(module, source)
        ahead += [name for name in _imports(path, path.stat().st_mtime_ns) if _file(name, source).is_file()]
        ahead += [module.rpartition(".")[0]] if "." in module else []
        ahead += _contents(module, source) if module in LOADED_BY_NAME else []
    return sorted(found - {"snugfit"})


def _contents(package: str, source: Path) -> list[str]:
    """A module, or a package with all its modules."""
    folder = source.joinpath(*package.split("."))
    return [package, *(f"{package}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__")]


def _model(name: str, source: Path) -> list[str]:
    """The module that declares a model; all of them if none does."""
    modules = _contents(MODELS, source)
    declaring = [module for module in modules if f'"{name}":' in _file(module, source).read_text(encoding="utf-8")]
    return declaring or modules


def _file(module: str, source: Path) -> Path:
    path = source.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _imports(path: Path, changed: int) -> list[str]:
    """Names of ``snugfit`` that a file imports, modules or not."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.startswith("snugfit.")]


@cache
def _statements(path: Path, changed: int) -> tuple[str, ...]:
    """Digests of a file's statements."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = list(_matters(body))  # type: ignore[attr-defined]
    return tuple(hashlib.sha256(ast.dump(each).encode()).hexdigest() for each in tree.body)


def _matters(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements other than imports and documentation."""
    for each in body:
        text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        if not text and not isinstance(each, ast.Import | ast.ImportFrom):
            yield each
