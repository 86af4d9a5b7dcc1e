"""``snugfit plan`` and ``snugfit profile`` by the shape of images, with their real child process."""

import json

import pytest
from command_line import snug

IMAGE = ("--model", "smallconv", "--input-shape", "1x8x8")
SMALL = ("--classes", "7", "--batch-size", "8", "--threads", "1")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a command without a data folder; returns its JSON and its stderr."""
    monkeypatch.setenv("SNUGFIT_DATA", str(tmp_path / "nowhere"))

    def call(command, *flags):
        done = snug(command, *SMALL, *flags, "--json", cwd=tmp_path)
        return json.loads(done.stdout), done.stderr

    return call


def test_a_plan(run):
    plan, shown = run("plan", *IMAGE, "--strategy", "backprop", "--memory", "100MB")
    work = plan["workload"]
    assert (work["input_shape"], work["classes"], work["train_count"]) == ([1, 8, 8], 7, 10_000)
    assert plan["candidates"][plan["chosen"]]["strategy"] == "backprop"
    assert plan["command"][plan["command"].index("--data") + 1] == "DATA"
    assert "--input-shape" not in plan["command"] and "are for 10,000 training images" in shown


NETWORK = """from torch import nn


class Network(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.convolution, self.words, self.head = nn.Conv2d(3, 8, 3), nn.Embedding(100, 8), nn.Linear(8, classes)

    def forward(self, image, ids):
        return self.head((self.convolution(image).mean((2, 3)) + self.words(ids).mean(1)).relu())
"""
INPUTS = ("--model", "fused:Network", "--input-shape", "image=3x8x8,ids=16xint64")


def test_a_plan_of_several_inputs(run, tmp_path):
    (tmp_path / "fused.py").write_text(NETWORK)
    plan, shown = run("plan", *INPUTS)
    assert [each["name"] for each in plan["workload"]["inputs"]] == ["image", "ids"]
    assert plan["candidates"][plan["chosen"]]["exact"] and "are for 10,000 training images" in shown
    assert plan["command"][plan["command"].index("--data") + 1] == "DATA" and "--image-size" not in plan["command"]


def test_a_profile_of_several_inputs(run, tmp_path):
    (tmp_path / "fused.py").write_text(NETWORK)
    found, shown = run("profile", *INPUTS)
    assert [each["dtype"] for each in found["inputs"]] == ["float32", "int64"]
    assert found["units"][-1]["parameters"] == 7 * 9 and {each["seconds"] for each in found["units"]} == {None}
    assert "inputs image 3x8x8 of float32 and ids 16 of int64" in " ".join(shown.split())
    assert "units are not timed: needs a network of one input" in shown


def test_a_profile(run):
    found, shown = run("profile", *IMAGE)
    assert found["input_shape"] == [1, 8, 8] and any(unit["seconds"] > 0 for unit in found["units"])
    assert found["units"][-1]["parameters"] == 7 * 513 and "input 1 x 8 x 8" in shown
