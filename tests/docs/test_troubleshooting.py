"""The errors on the page of troubleshooting are those that a reader gets."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import ROOT, snugfit_commands
from PIL import Image

import snugfit
from snugfit import errors
from snugfit._cli.child_process import death_error

PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCE = Path(snugfit.__file__).parent
NETWORK = """from torch import nn


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, classes)

    def forward(self, images):
        features = self.conv(images).mean((2, 3))

        if features.sum() > 0:
            features = features * 2
        return self.head(features)
"""


def sections():
    """The block of an error, and the command before it or None, by heading."""
    for part in PAGE.read_text().split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        found = dict(re.findall(r"^```(sh|text)\n(.*?)\n```$", body, re.MULTILINE | re.DOTALL))
        yield heading, found.get("sh"), found["text"].removeprefix("error: ")


WITH_COMMAND = {heading: message for heading, command, message in sections() if command}
ALONE = {heading: message for heading, command, message in sections() if not command}


@pytest.fixture
def folder(tmp_path):
    """What the commands of the page find."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "album").mkdir()
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos" / "cats" / "bad.jpg").write_text("no image")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "notes.txt").write_text("mine")
    (tmp_path / "net.py").write_text(NETWORK)
    return tmp_path


@pytest.mark.parametrize(
    ("heading", "command"), [*zip(WITH_COMMAND, snugfit_commands(PAGE), strict=True)], ids=list(WITH_COMMAND)
)
def test_the_command_ends_with_the_error(heading, command, folder, monkeypatch):
    monkeypatch.delenv("SNUGFIT_DATA", raising=False)
    if "torchvision:resnet18" in command:  # found before one that is installed
        (folder / "torchvision.py").write_text("raise ImportError('not here')")
    if "cuda" in command and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    start = "from snugfit._cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, *command, "--quiet"],
        check=False, cwd=folder, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    said = done.stderr.partition("error: ")[2].replace(f"{folder}/", "").strip()
    assert said.startswith(WITH_COMMAND[heading]), done.stderr


def test_an_infeasible_budget_reads_so():
    first = "vgg16 on digits does not fit a budget of 60.0 MB of memory."
    error = errors.InfeasibleBudgetError(
        first, closest="blockwise (needs 90.0 MB)", lacking_bytes=30_000_000, smallest_bytes=90_000_000
    )
    assert ALONE["Nothing fits the budget"] == str(error)


def test_a_killed_process_reads_so():
    error = death_error(-9, {"command": "train"}, "runs/first", of_memory=True)
    assert ALONE["The process was killed"] == str(error)


def test_divergence_reads_so():
    message = ALONE["Training diverged"]
    text = "\n".join(path.read_text() for path in (SOURCE / "_training").rglob("*.py"))
    for part in (
        "NaN or infinite",
        "Lower --lr in a new run, or check the data for broken images; what was saved is untouched.",
    ):
        assert part in message and part in re.sub(r'"\n\s+f?"', "", text)


def test_every_error_is_compared():
    assert set(ALONE) == {"Nothing fits the budget", "The process was killed", "Training diverged"}
    assert len(WITH_COMMAND) >= 9
