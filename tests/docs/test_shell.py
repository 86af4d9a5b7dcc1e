"""The shell code of the documents runs as it stands, where it needs no network, data sets, hosts or hours."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pages import PAGES, code_blocks, name
from PIL import Image

NOT_RUN = {
    r"pip install|venv|^pytest": "installs snugfit, or is for its developers; .ci/run does it",
    r"imagenet|\.pth|cifar10|pets": "needs weights or data sets",
    r"--hosts|srun|mpirun": "needs hosts, or a launcher of jobs",
    r"yolov2_16 .*--memory|cluster launch .*--data digits": "trains for an hour",
    r"--compare": "tries strategies for minutes; the Python code of the same page does it for a smaller network",
}
"""Blocks that are not run, by an expression that finds them, and why."""
FAST = re.compile(r"snugfit (evaluate|predict|estimate --model package|export \S+ --out \S+ --format safetensors)\b")
PROGRAM = f'#!/bin/sh\nexec {sys.executable} -m snugfit "$@"\n'
MODULE = """from torch import nn


class Network(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.convolution, self.words = nn.Conv2d(3, 8, 3, stride=8), nn.Embedding(100, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, image, ids, age):
        seen = self.convolution(image).mean((2, 3)) + self.words(ids).mean(1)
        return self.head(seen + age.unsqueeze(1))
"""
PLAN = """import snugfit
options = {"image_size": 8, "max_train": 64, "epochs": 1, "strategy": "backprop"}
snugfit.plan("smallconv", "digits", out="runs/first", **options)"""


def lines(code: str) -> list[str]:
    """Commands of a block, without comments."""
    return [line for each in code.splitlines() if (line := each.partition("#")[0].strip())]


def reasons(code: str) -> list[str]:
    """Why a block is not run."""
    return [why for found, why in NOT_RUN.items() if re.search(found, "\n".join(lines(code)), re.MULTILINE)]


BLOCKS = {
    code: name(page)
    for page in PAGES
    if page.name != "troubleshooting.md"  # test_troubleshooting.py runs its commands
    for code in code_blocks(page, "sh") + code_blocks(page, "bash")
}
"""The page of each different block."""
RUN = {code: page for code, page in BLOCKS.items() if not reasons(code)}
AT_ONCE = [code for code in RUN if all(map(FAST.match, lines(code)))]
SLOW = [code for code in RUN if code not in AT_ONCE]


def shell(code: str, folder: Path) -> None:
    """Run code as a reader does, who has snugfit on the path; every command succeeds."""
    program = folder / "bin" / "snugfit"
    program.parent.mkdir(exist_ok=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    environment = {**os.environ, "PATH": os.pathsep.join([str(program.parent), os.environ["PATH"]])}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-2000:]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the pages speak of: photos of two classes, and a module."""
    pixels = np.random.default_rng(0)
    for kind in ("cats", "dogs"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(20):
            image = Image.fromarray(pixels.integers(0, 256, (100, 120, 3), dtype=np.uint8))
            image.save(tmp_path / "photos" / kind / f"{number}.jpg")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(MODULE)
    return tmp_path


def small_run(end: str, folder: Path) -> None:
    """A folder ``runs/first`` that a plan makes by this call."""
    code = f"{PLAN}.{end}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder, capture_output=True, timeout=250)


def test_what_takes_seconds_runs(folder):
    small_run("run(())", folder)
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "photos")
    shell("\n".join(AT_ONCE), folder)
    assert (folder / "deploy" / "model.safetensors").stat().st_size > 0
    assert len((folder / "classes.csv").read_text().splitlines()) == 41


@pytest.mark.slow
@pytest.mark.parametrize("code", SLOW, ids=[f"{RUN[code]}: {lines(code)[0][:60]}" for code in SLOW])
def test_what_takes_longer_runs(code, folder):
    if "--resume" in code:
        small_run("begin()", folder)
    if "cluster.json" in code:
        shell("snugfit cluster doctor --processes 2 --out cluster.json", folder)
    shell(code, folder)


def test_every_reason_not_to_run_applies():
    assert {why for code in BLOCKS for why in reasons(code)} == {*NOT_RUN.values()}
