"""Rules on packages that an import graph of packages cannot tell."""

import re
from pathlib import Path

import snugfit

SOURCE = Path(snugfit.__file__).parent
ALLOWED = ("tiling/", "_training/launch/", "memory/_tracker.py")


def test_only_tiling_and_launch_use_collectives():
    uses = re.compile(r"^\s*(import|from) torch\.distributed", re.MULTILINE)
    files = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if uses.search(path.read_text())]
    assert [file for file in files if not file.startswith(ALLOWED)] == []
    assert any(file.startswith("_training/launch/") for file in files)
