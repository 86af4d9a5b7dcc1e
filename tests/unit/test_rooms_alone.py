"""Each room for loops of one's own is usable alone: it brings nothing of what trains and plans with it."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

ROOMS = ("memory", "lean", "local", "selection", "surgery", "tiling")
ABOVE = ("snugfit.api", "snugfit.cli", "snugfit.planner", "snugfit.report", "snugfit.strategies", "snugfit.training",
         "snugfit.models", "snugfit.data", "kornia", "matplotlib")  # fmt: skip


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_imported_alone(room):
    others = [f"snugfit.{other}" for other in ROOMS[2:] if other != room]
    code = f"import sys, snugfit.{room}; print([name for name in {[*ABOVE, *others]} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("room", ROOMS)
def test_everything_public_in_a_room_is_described_and_typed(room):
    module = import_module(f"snugfit.{room}")
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
