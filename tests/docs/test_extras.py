"""Installations that errors and pages name work: their extras exist, and bring what is missing."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pages import PAGES, ROOT, name, project

SOURCES = sorted((ROOT / "src").rglob("*.py"))
PROJECT = project((ROOT / "pyproject.toml").read_text())
EXTRAS = {extra: [Requirement(text) for text in listed] for extra, listed in PROJECT["optional-dependencies"].items()}
_INSTALL = re.compile(r"pip install ([^`\n&;)]+)")
_OURS = re.compile(r'(?:torch==\S+ )?(?:-e )?"(?:snugfit|\.)\[([\w,]+)\]"')


def installs(path: Path) -> list[str]:
    """What ``pip install`` is given, wherever a file says so."""
    return [found.strip(" .'\\") for found in _INSTALL.findall(path.read_text())]


def extras(given: str) -> list[str]:
    found = _OURS.match(given)
    assert found, f"pip install {given} names no extra"
    return found[1].split(",")


def test_lines_are_found_and_read():
    told = [given for path in SOURCES for given in installs(path)]
    named = {"accelerate", "demo", "export", "huggingface", "lightning", "ultralytics", "vision"}
    assert len(told) >= 5 and {extra for given in told for extra in extras(given)} == named
    with pytest.raises(AssertionError, match="names no extra"):
        extras("torchvision")


@pytest.mark.parametrize("path", [path for path in SOURCES if installs(path)], ids=name)
def test_an_error_names_extras_that_exist(path):
    assert {extra for given in installs(path) for extra in extras(given)} <= set(EXTRAS)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md" and installs(page)], ids=name)
def test_a_page_names_extras_that_exist(page):
    assert {extra for given in installs(page) for extra in extras(given)} <= set(EXTRAS)


def test_extras_bring_what_errors_miss():
    needed = {
        "demo": {"scikit-learn"},
        "accelerate": {"accelerate"},
        "huggingface": {"transformers", "accelerate"},
        "lightning": {"lightning"},
        "ultralytics": {"ultralytics"},
        "export": {"onnx", "onnxscript", "onnxruntime"},
        "vision": {"torchvision", "timm"},
    }
    for extra, packages in needed.items():
        assert packages <= {requirement.name for requirement in EXTRAS[extra]}, extra


def test_extras_refer_to_extras_that_exist():
    own = [requirement for listed in EXTRAS.values() for requirement in listed if requirement.name == PROJECT["name"]]
    assert own and {extra for requirement in own for extra in requirement.extras} <= set(EXTRAS)
