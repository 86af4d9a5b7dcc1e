"""What is public is listed, and documents and examples use nothing else."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import get_origin

import pytest
from pages import PAGES, ROOT, code_blocks, name

import snugfit

DESCRIBES_THE_INSIDE = {"docs/design.md", "docs/upstream.md", "CHANGELOG.md"}
GUIDES = [page for page in PAGES if name(page) not in DESCRIBES_THE_INSIDE]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PACKAGES = ("snugfit", *(f"snugfit.{package}" for package in snugfit.PUBLIC if package != "integrations"))
"""Without the modules for other libraries, which need not be installed."""


def is_public(dotted: str) -> bool:
    """Whether every part of a name like ``snugfit.tiling.TiledForward.profile`` is listed, as far as lists go."""
    package = "snugfit"
    for part in dotted.split(".")[1:]:
        if package == "snugfit" and part in snugfit.PUBLIC:
            package = f"snugfit.{part}"
        else:
            return part in import_module(package).__all__
    return True


def imported(code: str) -> set[str]:
    """Dotted names of snugfit that a script imports."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {each for each in names if each.split(".")[0] == "snugfit"}


def mentioned(text: str) -> set[str]:
    """Dotted names of snugfit anywhere in a text: in code, and in prose as names or as paths of source files."""
    paths = (path.replace("/", ".") for path in re.findall(r"\bsrc/(snugfit(?:/\w+)+)\.py", text))
    text = re.sub(r"entry-points\.\"[^\"]*\"", "", text)
    return {*paths, *re.findall(r"(?<![\w/.-])snugfit(?:\.[A-Za-z_]\w*)+", text)}


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_a_page_uses_public_names_only(page):
    text = page.read_text()
    used = mentioned(text).union(*(imported(code) for code in code_blocks(page, "python")))
    assert [each for each in sorted(used) if not is_public(each)] == []
    assert re.findall(r"`_\w+/[^`]*`", text) == []


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_an_example_uses_public_names_only(script: Path):
    used = mentioned(script.read_text()) | imported(script.read_text())
    assert [each for each in sorted(used) if not is_public(each)] == []


def test_private_names_are_found():
    assert not is_public("snugfit._core.budget.Budget") and not is_public("snugfit.memory.limit.MemoryLimit")
    assert is_public("snugfit.integrations.lightning.MemoryBudget") and not is_public("snugfit.integrations._budget")
    assert is_public("snugfit.memory.MemoryLimit.refresh") and is_public("snugfit.errors.SnugfitError")
    assert imported("from snugfit.memory import limit") == {"snugfit.memory.limit"}
    assert mentioned("see `snugfit.memory.limit`, [events](../src/snugfit/_training/events.py)") == {
        "snugfit.memory.limit",
        "snugfit._training.events",
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_what_it_imports(package):
    module = import_module(package)
    file = import_module("snugfit._api" if package == "snugfit" else package).__file__
    assert isinstance(file, str)
    tree = ast.parse(Path(file).read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if package == "snugfit.errors":
        found = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    else:
        own = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "__future__")
        names = {alias.name for node in own for alias in node.names} - used
        found = {each for each in names if not each.startswith("__")}
    assert found == set(module.__all__)
    assert module.__all__ == sorted(module.__all__, key=lambda each: (not each.isupper(), each[0].islower(), each))


def test_public_names_are_found_when_they_are_used():
    assert "Budget" in snugfit.__all__ and snugfit.Budget is import_module("snugfit._core.budget").Budget
    listed = [each for each in dir(snugfit) if not each.startswith("_")]
    assert listed == sorted({*snugfit.__all__, *snugfit.PUBLIC, "PUBLIC"})
    with pytest.raises(AttributeError, match="'snugfit' has no attribute 'Bugdet'"):
        getattr(snugfit, "Bug" + "det")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_described_by_public_names(package):
    module = import_module(package)
    for public in module.__all__:
        thing = getattr(module, public)
        assert get_origin(thing) or not callable(thing) or inspect.getdoc(thing), public
        parts = [thing, *vars(thing).values()] if isinstance(thing, type) else [thing]
        text = "\n".join(str(getattr(part, "__doc__", "")) for part in parts)
        assert [each for each in sorted(mentioned(text)) if not is_public(each)] == [], public
