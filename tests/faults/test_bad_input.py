"""Bad input on the command line: one clear message, the right exit code, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import refusal
from PIL import Image

SMALL = ["--data", "digits", "--image-size", "16", "--max-train", "64", "--max-val", "20", "--epochs", "1"]


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
        (["--data", "folder:nowhere"], 4, "nowhere"),
    ],
)
def test_bad_options(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    assert said in refusal("train", *arguments, cwd=tmp_path, code=code)


def test_a_truncated_photo_is_named(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    broken = folder / "dog" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    options = ["--model", "tiny_nets:three_channels", "--image-size", "16", "--epochs", "1", "--batch-size", "8"]
    where = ["--data", f"folder:{folder}", "--strategy", "backprop"]
    assert "3.jpg" in refusal("train", *where, *options, cwd=tmp_path, code=4)


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    (folder / "bird").mkdir()
    assert "bird" in refusal("train", "--data", f"folder:{folder}", cwd=tmp_path, code=4)


def test_a_diverging_run_says_so(tmp_path: Path) -> None:
    options = ["--model", "tiny_nets:cnn", "--strategy", "backprop", "--lr", "1e30", "--batch-size", "16", *SMALL]
    assert "--lr" in refusal("train", *options, cwd=tmp_path, code=7)


def test_a_model_for_other_channels_is_refused(tmp_path: Path) -> None:
    assert "channel" in refusal("train", "--model", "tiny_nets:three_channels", *SMALL, cwd=tmp_path, code=4)
