"""The examples in docstrings run as they stand, and every public name has one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import snugfit
from snugfit import errors

SOURCE = Path(snugfit.__file__).parent
RUNNER = Path(__file__).with_name("run_doctests.py")
PACKAGES = ("memory", "lean", "local", "selection", "surgery", "tiling", "detection", "profiling")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(module_name(path) for path in SOURCE.rglob("*.py") if ">>> " in path.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Failed and attempted examples of every module, run in one fresh process: budgets count from its baseline."""
    folder = tmp_path_factory.mktemp("doctests")
    command = [sys.executable, RUNNER, *MODULES]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    *told, last = done.stdout.splitlines()
    return json.loads(last), "\n".join(told)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", MODULES)
def test_examples_of_a_module(module, results):
    counts, told = results
    failed, attempted = counts[module]
    assert attempted and not failed, told


@pytest.mark.parametrize("name", snugfit.__all__)
def test_every_public_name_has_an_example(name):
    thing = getattr(snugfit, name)
    kinds = [thing, snugfit.Event] if isinstance(thing, type) and issubclass(thing, snugfit.Event) else [thing]
    own = [part for kind in kinds for part in (kind, *(vars(kind).values() if isinstance(kind, type) else ()))]
    assert any(">>> " in (getattr(part, "__doc__", None) or "") for part in own)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_for_loops_of_ones_own_has_an_example(package):
    assert f"snugfit.{package}" in MODULES


def test_errors_have_an_example():
    assert errors.__name__ in MODULES
