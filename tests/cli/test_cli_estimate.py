"""``snugfit estimate`` with its real child process, and its errors."""

import json
import subprocess
import sys

import pytest
from command_line import snug

CALL = "import sys; from snugfit._cli import app; print(app.run(sys.argv[1:]), 'torch' in sys.modules)"


def test_an_estimate(tmp_path):
    small = ["--model", "smallconv", "--input-shape", "1x8x8", "--batch-size", "4,8"]
    outcome = snug("estimate", *small, "--json", cwd=tmp_path)
    found = json.loads(outcome.stdout)
    assert [step["batch_size"] for step in found["steps"]] == [4, 8]
    assert all(sum(step["at_peak"].values()) == step["peak_bytes"] for step in found["steps"])
    assert all(
        words in outcome.stderr for words in ("gradients of parameters", "what would lower", "on the meta device")
    )


def test_a_model_that_does_not_run_on_the_shape(tmp_path):
    outcome = snug("estimate", "--model", "vit_b_16", "--input-shape", "3x8x8", cwd=tmp_path, code=4)
    assert outcome.stdout == ""
    assert "a multiple of 16 pixels, not 8" in outcome.stderr


NETS = """
from torch import cat, nn
class Read(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv, self.words, self.head = nn.Conv2d(3, 4, 3), nn.Embedding(9, 2), nn.Linear(6, classes)
    def forward(self, photo, ids):
        return self.head(cat([self.conv(photo).mean((2, 3)), self.words(ids).mean(1)], 1))
"""


def test_an_estimate_of_several_inputs(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    flags = ["estimate", "--model", "nets:Read", "--batch-size", "4", "--classes", "5", "--json"]
    outcome = snug(*flags, "--input-shape", "photo=3x8x6,ids=16xint64", cwd=tmp_path)
    found = json.loads(outcome.stdout)
    assert found["inputs"][1] == {"shape": [16], "dtype": "int64", "name": "ids"}
    assert found["steps"][0]["whole"]["batch"] == 4 * (4 * 3 * 8 * 6 + 8 * 16 + 8)
    assert "Inputs are photo 3x8x6 of float32 and ids 16 of int64." in outcome.stderr


@pytest.mark.parametrize(
    "flags, text",
    [
        (["--input-shape", "3x32"], "--input-shape must be channels, height and width, like 3x224x224, or several"),
        (["--input-shape", "3x32x32,16xint46"], "like 3x224x224,16xint64, not '3x32x32,16xint46'"),
        ([], "--input-shape"),
        (["--input-shape", "3x32x32", "--batch-size", "many"], "--batch-size"),
        (["--input-shape", "3x32x32", "--model", "vgg61"], "Did you mean 'vgg19'"),
    ],
)
def test_usage_errors_come_before_torch(flags, text):
    command = [sys.executable, "-c", CALL, "estimate", *flags]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert outcome.stdout.split() == ["2", "False"]
    assert text in outcome.stderr
