"""The code in the documents and the examples runs as it stands."""

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


def test_own_module(tmp_path):
    printed = run((ROOT / "examples" / "own_module.py").read_text(), tmp_path)
    assert "logits of an empty image: (1, 10)" in printed
    assert (tmp_path / "small_net.safetensors").stat().st_size > 0


def test_own_training_loop(tmp_path):
    lines = run((ROOT / "examples" / "own_training_loop.py").read_text(), tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["limit", "lean", "local"]
    if sys.platform == "linux":
        assert "enforced: True" in lines[0] and "batch 512" not in lines[0]


@pytest.mark.parametrize("page", ["README.md", "docs/adding_a_local_loss.md", "docs/adding_a_strategy.md"])
def test_python_of_a_page(page, tmp_path):
    printed = run("\n".join(code_blocks(ROOT / page, "python")), tmp_path)
    assert printed.splitlines()[-1].endswith("True")
    assert list(tmp_path.glob("runs/*/model.safetensors"))


def test_the_strategy_of_the_page_says_what_an_impossible_budget_lacks(tmp_path):
    page = "\n".join(code_blocks(ROOT / "docs/adding_a_strategy.md", "python"))
    more = """
impossible = snugfit.plan("vgg8", "digits", memory="1MB", strategy="head-only", max_train=64)
print(impossible.plan.choice is None, impossible.plan.candidates[0].smallest_bytes > 1_000_000)
"""
    assert run(page + more, tmp_path).splitlines()[-1] == "True True"
