"""Each package for loops of one's own is usable alone: it brings nothing of what trains and plans with it."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

PACKAGES = ("memory", "lean", "local", "selection", "surgery", "tiling", "detection", "profiling")
ABOVE = (
    *(f"snugfit.{package}" for package in ("_api", "_cli", "_engine", "_planner", "_report", "strategies")),
    *("snugfit._training", "snugfit._models", "snugfit._data", "matplotlib"),
)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_imported_alone(package):
    others = [f"snugfit.{other}" for other in PACKAGES[2:] if other != package]
    code = f"import sys, snugfit.{package}; print([name for name in {[*ABOVE, *others]} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_public_in_a_package_is_described_and_typed(package):
    module = import_module(f"snugfit.{package}")
    for name in module.__all__:
        thing = getattr(module, name)
        if not callable(thing):
            continue
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            assert_typed(thing)


def assert_typed(function):
    signature = inspect.signature(function)
    untyped = [each.name for each in signature.parameters.values() if each.annotation is each.empty]
    assert untyped == [] and signature.return_annotation is not signature.empty, function.__name__
