"""The page "From the command to the first step" names the files that control passes through, in their order."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from pages import ROOT

import snugfit

MOST_FILES = 15
SMALL = ("--model", "smallconv", "--data", "digits", "--image-size", "8", "--max-train", "32", "--epochs", "1")


def traced(folder: Path) -> list[str]:
    """Files on the call stack at each stage of a real run, in the order in which they are entered."""
    search = os.pathsep.join([str(Path(__file__).parent / "tracing"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, "FIRST_STEP_TRACE": str(folder / "stacks")}
    environment["FIRST_STEP_SOURCE"] = f"{Path(snugfit.__file__).parent}{os.sep}"
    options = ("--strategy", "backprop", "--profile-cache", "off", "--threads", "1", "--out", "run", "--quiet")
    command = [sys.executable, "-c", "from snugfit._cli import main; main()", "train", *SMALL, *options]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=250)
    stacks = [json.loads(line) for line in (folder / "stacks").read_text().splitlines()]
    assert [stage for stage, _ in stacks][-1] == "step"
    return list(dict.fromkeys(name for _, files in stacks for name in files))


def documented() -> list[str]:
    text = (ROOT / "docs" / "design.md").read_text()
    section = text.partition("## From the command to the first step\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| \d+ \| `([\w/.]+)` \|", section, re.MULTILINE)


def test_the_page_names_the_files_on_the_way(tmp_path):
    way = traced(tmp_path)
    assert documented() == way
    assert len(way) <= MOST_FILES
