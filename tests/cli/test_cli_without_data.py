"""``snugfit plan`` and ``snugfit profile`` by the shape of images, with their real child process."""

import json

import pytest
from command_line import snug

SMALL = ["--model", "smallconv", "--input-shape", "1x8x8", "--classes", "7", "--batch-size", "8", "--threads", "1"]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a command without a data folder; returns its JSON and its stderr."""
    monkeypatch.setenv("SNUGFIT_DATA", str(tmp_path / "nowhere"))

    def call(command, *flags):
        done = snug(command, *SMALL, *flags, "--json", cwd=tmp_path)
        return json.loads(done.stdout), done.stderr

    return call


def test_a_plan(run):
    plan, shown = run("plan", "--strategy", "backprop", "--memory", "100MB")
    work = plan["workload"]
    assert (work["input_shape"], work["classes"], work["train_count"]) == ([1, 8, 8], 7, 10_000)
    assert plan["candidates"][plan["chosen"]]["strategy"] == "backprop"
    assert plan["command"][plan["command"].index("--data") + 1] == "DATA"
    assert "--input-shape" not in plan["command"] and "are for 10,000 training images" in shown


def test_a_profile(run):
    found, shown = run("profile")
    assert found["input_shape"] == [1, 8, 8] and any(unit["seconds"] > 0 for unit in found["units"])
    assert found["units"][-1]["parameters"] == 7 * 513 and "input 1 x 8 x 8" in shown
