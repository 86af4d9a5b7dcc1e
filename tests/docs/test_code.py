"""The code in the documents and the examples runs as it stands."""

import re
import subprocess
import sys

import pytest
from pages import ROOT, code_blocks


def run(code: str, folder) -> str:
    """Run a script in a fresh process, as a reader would, and return what it printed."""
    script = folder / "script.py"
    script.write_text(code)
    command = [sys.executable, script.name]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_example(name: str, folder) -> str:
    return run((ROOT / "examples" / f"{name}.py").read_text(), folder)


def numbers(text: str, unit: str) -> list[float]:
    return [float(found) for found in re.findall(rf"(\d[\d.]*) ?{unit}", text)]


def test_own_module(tmp_path):
    printed = run_example("own_module", tmp_path)
    assert "logits of an empty image: (1, 10)" in printed
    assert (tmp_path / "small_net.safetensors").stat().st_size > 0


def test_own_loop_with_memory(tmp_path):
    printed = run_example("own_loop_with_memory", tmp_path)
    refused = re.findall(r"^(\d+) images at once are refused$", printed, re.MULTILINE)
    micro, enforced = re.search(r"of 256 images, (\d+) at once; enforced: (\w+)$", printed, re.MULTILINE).groups()
    assert int(micro) * 2 ** len(refused) == 256 and "within the budget: True" in printed
    if sys.platform == "linux":
        assert enforced == "True" and refused


def test_own_loop_with_lean(tmp_path):
    printed = run_example("own_loop_with_lean", tmp_path)
    before, after = numbers(printed.splitlines()[0], "MB")
    assert after < 0.7 * before
    assert "same weights after training: True\nplain again: True" in printed


def test_own_loop_with_local(tmp_path):
    printed = run_example("own_loop_with_local", tmp_path)
    exits = numbers(printed, "%")
    assert len(exits) == 2 and min(exits) > 60, "ten classes"


def test_own_loop_with_selection(tmp_path):
    printed = run_example("own_loop_with_selection", tmp_path)
    told = re.findall(r"^trains for (\d+)% of a full step: (.+)$", printed, re.MULTILINE)
    assert len(told) == 3
    assert all(int(share) <= 80 and "11.weight 11.bias" in names for share, names in told)
    assert numbers(printed.splitlines()[-1], "%")[-1] > 60, "ten classes"


def test_own_loop_with_surgery(tmp_path):
    printed = run_example("own_loop_with_surgery", tmp_path)
    assert "widths [8, 16, 24], same outputs: True\nsame outputs with the side network: True" in printed
    trained, full = map(int, re.search(r"trains: (\d+) of (\d+) parameters", printed).groups())
    assert trained < full
    first, last = map(float, re.search(r"loss from (\S+) to (\S+)$", printed.strip()).groups())
    assert last < first / 2


def test_own_loop_with_tiling(tmp_path):
    lines = run_example("own_loop_with_tiling", tmp_path).splitlines()
    assert len(lines) == 3
    for line in lines:
        assert float(re.search(r"differ by (\S+) of", line)[1]) < 1e-10
        whole, tiles = numbers(line, "MB")
        assert tiles < whole / 3


def test_every_example_is_run_and_short():
    tested = {name.removeprefix("test_") for name in globals()}
    for example in (ROOT / "examples").glob("*.py"):
        assert example.stem in tested
        assert len(example.read_text().splitlines()) <= 80


@pytest.mark.parametrize("page", ["README.md", "docs/adding_a_local_loss.md"])
def test_python_of_a_page(page, tmp_path):
    printed = run("\n".join(code_blocks(ROOT / page, "python")), tmp_path)
    assert printed.splitlines()[-1].endswith("True")
    assert list(tmp_path.glob("runs/*/model.safetensors"))


def test_a_subscriber_of_the_page_stops_the_run(tmp_path):
    printed = run("\n".join(code_blocks(ROOT / "docs/own_training_loop.md", "python")), tmp_path)
    assert "stopped; continue with: snugfit train --resume runs/patient" in printed
    assert int(re.search(r"stopped after (\d+) of 16 steps", printed)[1]) < 16
    assert printed.splitlines()[-1] == "all steps by now: True"
