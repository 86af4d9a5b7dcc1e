"""The project's pages, and what stands in them."""

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it there

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    """A page's path from the project's root."""
    return page.relative_to(ROOT).as_posix()


def code_blocks(page: Path, language: str) -> list[str]:
    """Fenced code of one language, in order."""
    return [code for kind, code in _FENCE.findall(page.read_text()) if kind == language]


def prose(page: Path) -> str:
    """A page without its fenced code."""
    return _FENCE.sub("", page.read_text())


def project(toml: str) -> dict:
    """The table ``project`` of a pyproject.toml."""
    return tomllib.loads(toml)["project"]


def snugfit_commands(page: Path) -> list[list[str]]:
    """Arguments of every ``snugfit`` command in a page's shell code."""
    commands = []
    for line in "\n".join(code_blocks(page, "sh") + code_blocks(page, "bash")).splitlines():
        for part in line.partition("#")[0].split("&&"):
            words = part.split()
            if words and words[0].rpartition("/")[2] == "snugfit":
                commands.append(words[1:])
    return commands
