"""A budget that is too small is turned down at once, and the one that is named instead is enough to train in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run

from snugfit._core.amounts import parse_bytes
from snugfit.errors import InfeasibleBudgetError

RUN = [
    "--data", "digits", "--batch-size", "8", "--epochs", "1", "--max-train", "16", "--max-val", "10", "--threads", "1",
    "--no-report", "--json", "--quiet",
]  # fmt: skip


def train(folder: Path, memory: str, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit code and output of a run in a process of its own, in which nothing was left behind before."""
    done = run("train", *RUN, *more, "--memory", memory, "--out", str(folder))
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    ("strategy", "model", "least", "most"),
    [
        pytest.param("sidenet", "tiny_nets:cnn", 8_000_000, 20_000_000, marks=pytest.mark.slow),
        pytest.param("sidenet", "mobilenet_v2", 20_000_000, 60_000_000, marks=pytest.mark.slow),
        pytest.param("checkpoint", "mobilenet_v2", 20_000_000, 60_000_000, marks=pytest.mark.slow),
    ],
)
def test_the_smallest_budget_is_one_that_works(tmp_path, strategy, model, least, most):
    options = ["--model", model, "--image-size", "64", "--strategy", strategy]
    code, told = train(tmp_path / "refused", f"{least}B", *options)
    assert code == InfeasibleBudgetError.exit_code
    named = told["error"]["message"].rpartition("would do: ")[2].rstrip(".")
    assert least < parse_bytes(named) < most
    code, told = train(tmp_path / "run", named.replace(" ", ""), *options)
    assert code == 0, told
    assert told["enforced"] and told["measured"]["peak_bytes"] <= told["predicted"]["peak_bytes"] <= parse_bytes(named)


def test_three_mb_less_than_the_smallest_budget_is_refused_and_names_the_same(tmp_path):
    """The figure does not depend on the budget that is refused, nor on what was measured before."""
    small = ["--model", "smallconv", "--image-size", "16", "--strategy", "backprop", "--profile-cache", str(tmp_path)]

    def named(folder: str, memory: str) -> str:
        code, told = train(tmp_path / folder, memory, *small)
        assert code == InfeasibleBudgetError.exit_code, memory
        return str(told["error"]["message"]).rpartition("would do: ")[2].rstrip(".")

    smallest = named("refused", "8MB")
    assert named("again", f"{parse_bytes(smallest) - 3_000_000}B") == smallest
    code, told = train(tmp_path / "run", smallest.replace(" ", ""), *small)
    assert code == 0, told
    assert told["measured"]["peak_bytes"] <= told["predicted"]["peak_bytes"] <= parse_bytes(smallest)
