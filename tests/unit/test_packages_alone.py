"""Each package for loops of one's own is usable alone: it brings nothing of what trains and plans with it."""

import inspect
from importlib import import_module

import pytest
from forked import run_copies

PACKAGES = ("memory", "lean", "local", "selection", "surgery", "tiling", "detection", "profiling")
ABOVE = (
    *(f"snugfit.{package}" for package in ("_api", "_cli", "_engine", "_planner", "_report", "strategies")),
    *("snugfit._training", "snugfit._models", "snugfit._data", "matplotlib"),
)


def test_a_package_is_imported_alone():
    cases = []
    for package in PACKAGES:
        others = [f"snugfit.{other}" for other in PACKAGES[2:] if other != package]
        cases.append(f"import snugfit.{package}; print([each for each in {[*ABOVE, *others]} if each in sys.modules])")
    assert run_copies("import sys, torch", *cases) == [(0, "[]\n")] * len(cases)


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
