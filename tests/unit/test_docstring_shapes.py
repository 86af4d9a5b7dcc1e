"""Docstrings of functions on tensors give the shapes of these."""

import ast
import re
from pathlib import Path

import pytest

import snugfit

SOURCE = Path(snugfit.__file__).parent
SHAPE = re.compile(r"\(\)|\([\w.*+/'-]{1,12},|\bscalar|\bshapes?\b")
"""Such as (B, C, H, W), (C,), (..., K) and (); or the word."""


def on_tensors(function):
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    hints = [each.annotation for each in every if each is not None] + [function.returns]
    return any(re.search(r"\bTensor\b", ast.unparse(hint)) for hint in hints if hint is not None)


def without_shapes(path):
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    found = [(each.name, ast.get_docstring(each)) for each in functions if on_tensors(each)]
    return [name for name, text in found if text and not SHAPE.search(text)]


@pytest.mark.parametrize("package", sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")}))
def test_docstrings_of_functions_on_tensors_give_shapes(package):
    paths = SOURCE.glob(package) if package.endswith(".py") else (SOURCE / package).rglob("*.py")
    missing = {path.relative_to(SOURCE).as_posix(): without_shapes(path) for path in paths}
    assert {path: names for path, names in missing.items() if names} == {}
