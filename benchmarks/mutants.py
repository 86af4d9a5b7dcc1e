"""Claim: the tests notice at least 85 % of small changes to the code that decides what fits and what is learned.

mutmut (``pip install mutmut``) changes one operator, constant or argument at a time in a copy of the sources, and runs
the tests that reach it. A group is some files with the tests that should notice. A run that is stopped goes on where it
was, as long as its folder is there and sources and tests are the same; otherwise it begins anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import DEFAULTS, ROOT, Cell, Options, program
from benchmarks.machine import commit
from benchmarks.store import ResultFile, finish, markdown, percent

TARGET = 0.85
_COPIED = ("src", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
_PYTEST = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
_STAMP = "copied.json"
_OUTCOMES = {0: "survived", 5: "untested", 33: "untested", 34: "skipped"}


@dataclass(frozen=True)
class Group:
    """Files that are changed together.

    Attributes:
        sources: files below src/snugfit.
        tests: files or folders below tests/unit that should notice.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]


GROUPS = {
    "tiling": Group(
        ("tiling/geometry.py", "tiling/layers.py"),
        ("tiling/test_geometry.py", "tiling/test_layers.py", "tiling/test_splitting.py", "tiling/test_grouping.py",
         "tiling/test_cost_counter.py"),
    ),
    "solver": Group(("selection/solver.py", "selection/quantise.py"), ("selection/test_solver.py",)),
    "choice": Group(("selection/choice.py",), ("selection/test_choice.py",)),
    "pareto": Group(("selection/pareto.py",), ("selection/test_pareto.py",)),
    "local": Group(
        ("local/auxiliary.py",),
        ("local/test_auxiliary.py", "local/test_exit_model.py", "local/test_local_losses.py"),
    ),
    "lls": Group(
        ("local/lls.py",),
        ("local/test_lls.py", "local/test_local_losses.py", "local/test_ending.py", "local/test_signal.py"),
    ),
    "partition": Group(("strategies/blockwise/partition.py",), ("strategies/test_partition.py",)),
    "feedback": Group(("strategies/feedback/rules.py",), ("strategies/test_feedback_formulas.py",)),
    "memory": Group(("memory/line_fit.py",), ("memory/test_line_fit.py",)),
    "store": Group(
        ("_chain/store.py", "_storage/tensor_file.py"),
        ("chain/test_store.py", "storage/test_tensor_file.py", "storage/test_checkpoint.py",
         "engine/test_weights.py"),
    ),
    "rows": Group(
        ("_storage/activation_cache.py",),
        ("storage/test_row_format.py", "storage/test_activation_cache.py", "training/test_batches.py"),
    ),
}  # fmt: skip

app = program("mutants")


@app.default
def main(
    *groups: str,
    minutes: float = 60.0,
    jobs: int = 2,
    sample: int | None = None,
    mutmut: Path = Path(sys.executable),
    options: Options = DEFAULTS,
) -> int:
    """Change the sources of some groups, and count the changes that the tests notice; exits with 1 below the target.

    For example: python -m benchmarks.mutants tiling solver --work /var/tmp/mutants

    Args:
        groups: tiling, solver, choice, pareto, local, lls, partition, feedback, memory, store, rows; all by default.
        minutes: time for each group.
        jobs: mutants that are tried at the same time.
        sample: mutants of each file that are tried, drawn at random but always the same; all by default.
        mutmut: Python that has mutmut; it need not have the tests' packages.
        options: results and work folder; the rest is not used.
    """
    results, work = ResultFile("mutants", options), (options.work or ROOT / "runs") / "mutants"
    for name in groups or tuple(GROUPS):
        folder = work / name
        at = prepare(GROUPS[name], folder)
        _run(folder, minutes, jobs, mutmut, sample)
        for source, counts in counted(folder):
            results.put(f"{name}: {source}", {**counts, "source": source, "group": name, "commit": at})
    finish(results, render)
    return int(any(share(cell) < TARGET for cell in results.cells))


def prepare(group: Group, folder: Path) -> str:
    """Copy the project, with mutmut's configuration, unless a run of the same sources and tests is to go on there.

    Returns:
        The commit that was copied.
    """
    stamp = folder / _STAMP
    digest = _digest(group)
    if stamp.is_file() and (found := json.loads(stamp.read_text()))["digest"] == digest:
        return str(found["commit"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    at = commit()
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy(source, folder / name)
    _configure(group, folder)
    stamp.write_text(json.dumps({"digest": digest, "commit": at}))
    return at


def _digest(group: Group) -> str:
    """Of all that outcomes depend on: the group, sources and tests."""
    found = hashlib.sha256(repr(group).encode())
    for name in ("src", "tests", "pyproject.toml"):
        for path in sorted([ROOT / name, *(ROOT / name).rglob("*")]):
            if path.is_file() and "__pycache__" not in path.parts:
                found.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return found.hexdigest()


def _configure(group: Group, folder: Path) -> None:
    settings = {
        "source_paths": ["src/"],
        "only_mutate": [f"src/snugfit/{source}" for source in group.sources],
        "also_copy": [name for name in _COPIED if name not in ("src", "tests", "pyproject.toml")],
        "pytest_add_cli_args": _PYTEST,
        "pytest_add_cli_args_test_selection": [f"tests/unit/{test}" for test in group.tests],
    }
    project = (folder / "pyproject.toml").read_text().replace(" -n logical --maxprocesses 4 --dist loadfile", "")
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    lines.append("use_git_change_detection = false")
    (folder / "pyproject.toml").write_text("\n".join([project, "[tool.mutmut]", *lines, ""]))


def _run(folder: Path, minutes: float, jobs: int, interpreter: Path, sample: int | None) -> None:
    """Try mutants until the time is over: all, or first one of every function, whose names are known only then."""
    deadline = time.monotonic() + 60 * minutes
    _mutmut(folder, deadline, jobs, interpreter, [] if sample is None else ["*__mutmut_1"])
    drawn = [] if sample is None else drawn_names(folder, sample)
    if drawn:
        _mutmut(folder, deadline, jobs, interpreter, drawn)


def _mutmut(folder: Path, deadline: float, jobs: int, interpreter: Path, names: list[str]) -> None:
    others = [path for path in sys.path if path and Path(path) not in (ROOT, ROOT / "src")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(others)}
    command = [str(interpreter), "-m", "mutmut", "run", "--max-children", str(jobs), *names]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            process.wait(timeout=max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()


def drawn_names(folder: Path, sample: int) -> list[str]:
    """Mutants that are left to be tried so that ``sample`` of every file are, or all where there are fewer."""
    names: list[str] = []
    for _, codes in _outcomes(folder):
        left = [name for name, code in codes.items() if code is None]
        wanted = min(sample - (len(codes) - len(left)), len(left))
        names += random.Random(0).sample(sorted(left), max(wanted, 0))
    return names


def _outcomes(folder: Path) -> Iterator[tuple[str, dict[str, int | None]]]:
    """Each changed file below src/snugfit, with the exit code of the tests by mutant; None where it was not tried."""
    root = folder / "mutants" / "src" / "snugfit"
    for path in sorted(root.rglob("*.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"]
        if codes:
            yield str(path.relative_to(root).with_suffix("")), codes


def counted(folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Each changed file below src/snugfit, with its mutants by what became of them."""
    for source, codes in _outcomes(folder):
        found = Counter("left" if code is None else _OUTCOMES.get(code, "noticed") for code in codes.values())
        yield source, {name: found[name] for name in _COLUMNS}


_COLUMNS = ("noticed", "survived", "untested", "skipped", "left")


def share(cell: Cell) -> float:
    """Mutants that were noticed, of those that were tried."""
    tried = cell["noticed"] + cell["survived"] + cell["untested"]
    return float(cell["noticed"] / tried) if tried else 1.0


def render(cells: list[Cell]) -> str:
    """A row per file."""
    rows = [[cell["source"], *(cell[name] for name in _COLUMNS), percent(share(cell))] for cell in cells]
    return markdown(("file", *_COLUMNS, "noticed of those tried"), rows)


if __name__ == "__main__":
    raise SystemExit(app())
