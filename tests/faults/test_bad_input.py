"""Bad input on the command line: one clear message, the right exit code, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

NETWORKS = Path(__file__).parents[1] / "conformance"
SMALL = ["--data", "digits", "--image-size", "16", "--max-train", "64", "--max-val", "20", "--epochs", "1"]


def snug(*arguments: str, cwd: Path) -> tuple[int, str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(NETWORKS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "snugfit", *arguments], cwd=cwd, capture_output=True, text=True, timeout=200,
        check=False, env=env,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert "Traceback" not in done.stderr
    return done.returncode, "\n".join(errors[-4:])


def photos(folder: Path) -> Path:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for index in range(12):
            Image.new("RGB", (20, 20), (index * 9, 40, 90)).save(folder / label / f"{index}.jpg")
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--model", "vgg61"], 2, "vgg16"),
        (["--data", "digit"], 2, "digits"),
        (["--strategy", "blockwyse"], 2, "blockwise"),
        (["--memory", "100 pounds"], 2, "100MB"),
        (["--model", "tiny_nets:pooled", "--memory", "3MB", *SMALL], 3, "Smallest budget"),
        (["--data", "folder:nowhere"], 4, "nowhere"),
    ],
)
def test_bad_options(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    assert (outcome := snug("train", *arguments, cwd=tmp_path))[0] == code, outcome
    assert said in outcome[1]


def test_a_truncated_photo_is_named(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    broken = folder / "dog" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    options = ["--model", "tiny_nets:three_channels", "--image-size", "16", "--epochs", "1", "--batch-size", "8"]
    code, said = snug("train", "--data", f"folder:{folder}", "--strategy", "backprop", *options, cwd=tmp_path)
    assert code == 4 and "3.jpg" in said


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    (folder / "bird").mkdir()
    code, said = snug("train", "--data", f"folder:{folder}", cwd=tmp_path)
    assert code == 4 and "bird" in said


def test_a_diverging_run_says_so(tmp_path: Path) -> None:
    options = ["--model", "tiny_nets:cnn", "--strategy", "backprop", "--lr", "1e30", "--batch-size", "16", *SMALL]
    code, said = snug("train", *options, cwd=tmp_path)
    assert code == 7 and "--lr" in said


def test_a_model_for_other_channels_is_refused(tmp_path: Path) -> None:
    code, said = snug("train", "--model", "tiny_nets:three_channels", *SMALL, cwd=tmp_path)
    assert code == 4 and "channel" in said
