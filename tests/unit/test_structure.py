"""The structure of the source, from its syntax trees: no import cycles, no long lists of parameters."""

import ast
import itertools
from collections import defaultdict
from pathlib import Path

import pytest

import snugfit

SOURCE = Path(snugfit.__file__).parent
MOST_PARAMETERS = 7
OPTIONS = {"snugfit.local.lls.LLS.__init__"}
"""Their keyword-only arguments are the options of a local loss on the command line."""


def modules():
    """Paths by dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("snugfit", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name, path, known):
    """Modules that a module imports anywhere in it: at its top, for type checking alone, or inside a function."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for each in node.names:
                yield from [found for found in (f"{base}.{each.name}", base) if found in known][:1]


def graph():
    known = modules()
    return {name: set(imported(name, path, known)) - {name} for name, path in known.items()}


def cycles(edges):
    """Groups of nodes that reach each other (Tarjan)."""
    index, low, stack, found, numbers = {}, {}, [], [], itertools.count()

    def visit(node):
        index[node] = low[node] = next(numbers)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def test_cycles_are_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    edges = graph()
    assert "snugfit._api.planning" in edges["snugfit._api"] and len(edges) > 300


def test_modules_do_not_import_each_other_in_a_circle():
    assert cycles(graph()) == []


def test_packages_do_not_import_each_other_in_a_circle():
    edges = defaultdict(set)
    for name, others in graph().items():
        package = name.split(".")[1:2]
        edges[".".join(package)] |= {other.split(".")[1] for other in others if other.count(".")} - set(package)
    for other in set().union(*edges.values()):
        edges[other] |= set()
    assert cycles(edges) == []


def functions(name, path):
    """Functions and methods by dotted name, and whether they have a first argument that is not passed."""
    for node in ast.walk(ast.parse(path.read_text())):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = f".{node.name}" if isinstance(node, ast.ClassDef) else ""
                yield f"{name}{inside}.{child.name}", child


def parameters(function):
    """Names of the parameters, without ``self``, ``cls``, and the ``ctx`` of an autograd function."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names[1:] if names[:1] and names[0] in ("self", "cls", "ctx") else names


def test_no_function_takes_more_than_seven_parameters():
    """Data classes are records: their fields are not counted."""
    long = {
        name: len(parameters(function))
        for module, path in modules().items()
        for name, function in functions(module, path)
        if len(parameters(function)) > MOST_PARAMETERS
    }
    assert set(long) == OPTIONS, long


@pytest.mark.parametrize(("text", "count"), [("def f(self, a, /, b, *c, d, **e): 0", 3), ("def f(): 0", 0)])
def test_parameters_are_counted(text, count):
    assert len(parameters(ast.parse(text).body[0])) == count
