"""Networks that cannot be divided, trained with modules that run again: within their budget, and to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import block_nets
import pytest
import torch
from block_nets import OnData, Twice, TwoInputs, deep, made_by
from parity_helpers import assert_same, interrupt
from safetensors.torch import load_file
from torch import Tensor, nn

import snugfit
from snugfit._api import RunnablePlan
from snugfit.errors import InfeasibleBudgetError

OPTIONS: dict[str, Any] = {"epochs": 1, "max_train": 48, "max_val": 8, "batch_size": 16, "image_size": 12, "seed": 3}
DEEP: dict[str, Any] = {
    "epochs": 1, "max_train": 12, "max_val": 4, "batch_size": 4, "image_size": 96, "accumulate": False, "threads": 1,
}  # fmt: skip


def test_a_budget_too_small_for_backprop_is_planned_and_trained(tmp_path: Path) -> None:
    """On the command line, which runs in processes of its own; the reference has room for everything."""
    command = [sys.executable, "-m", "snugfit", "train", "--model", "block_nets:deep", "--data", "digits", "--json"]
    tokens = "--strategy checkpoint --memory 48MB --out run --epochs 1 --max-train 12 --max-val 4 --batch-size 4"
    apart = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(block_nets.__file__).parent), *sys.path])}
    command += [*tokens.split(), "--image-size", "96", "--no-accumulate", "--threads", "1", "--no-report"]
    done = subprocess.run(command, cwd=tmp_path, env=apart, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert 0 < record["measured"]["peak_bytes"] <= record["predicted"]["peak_bytes"] <= 48_000_000
    assert record["settings"]["recomputation"].startswith("modules (blocks.0-")
    assert (record["settings"]["micro_batch"], record["settings"]["micro_batches"]) == (4, 1)
    plain = snugfit.plan(deep(), "digits", strategy="backprop", memory="1MB", **DEEP)
    with pytest.raises(InfeasibleBudgetError, match="one sample needs") as caught:
        plain.run(())
    assert caught.value.smallest_bytes > 48_000_000
    snugfit.plan("block_nets:deep", "digits", strategy="backprop", **DEEP).run((), out=tmp_path / "plain")
    assert_same(*(load_file(tmp_path / name / "model.safetensors") for name in ("plain", "run")))
    loaded = snugfit.load(tmp_path / "run", model=deep())
    assert loaded.blocks[1].first.weight is loaded.blocks[0].first.weight


def with_modules(plan: RunnablePlan, text: str) -> RunnablePlan:
    """The plan with modules that run again: without a tight budget there would be none."""
    (candidate,) = plan.plan.candidates
    candidate = replace(candidate, settings={**candidate.settings, "recomputation": text})
    return replace(plan, plan=replace(plan.plan, candidates=(candidate,)))


@pytest.mark.parametrize(("make", "optimizer"), [(OnData, "schedulefree"), (Twice, "sgd")])
def test_a_resumed_run_and_one_without_recomputation_end_with_the_same_bits(
    make: Callable[[], nn.Module], optimizer: str, tmp_path: Path
) -> None:
    settings = {**OPTIONS, "memory": "80MB", "optimizer": optimizer}
    snugfit.plan(made_by(make), "digits", strategy="backprop", **settings).run((), out=tmp_path / "plain")
    text = "modules (blocks.0-1 blocks.2.drop)"
    for name, count in (("straight", 0), ("run", 2)):
        plan = with_modules(snugfit.plan(made_by(make), "digits", strategy="checkpoint", **settings), text)
        if count:
            interrupt(plan, tmp_path / name, count=count)
            snugfit.resume(tmp_path / name, subscribers=(), model=made_by(make))
        else:
            plan.run((), out=tmp_path / name)
        assert json.loads((tmp_path / name / "record.json").read_text())["settings"]["recomputation"] == text
    plain, straight, resumed = (
        load_file(tmp_path / name / "model.safetensors") for name in ("plain", "straight", "run")
    )
    assert_same(plain, straight)
    assert_same(plain, resumed)


def test_several_inputs_end_with_the_same_bits(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    items = [
        ((torch.randn(2, 6, 6, generator=generator), torch.randn(3, generator=generator)), number % 2)
        for number in range(24)
    ]
    found: list[dict[str, Tensor]] = []
    for strategy in ("backprop", "checkpoint"):
        data = snugfit.from_dataset(items[:16], items[16:20], items[20:], as_is=True)
        plan = snugfit.plan(
            made_by(TwoInputs), data, strategy=strategy, epochs=2, batch_size=4, memory="80MB", threads=1
        )
        plan = with_modules(plan, "modules (blocks.0-2)") if strategy == "checkpoint" else plan
        plan.run((), out=tmp_path / strategy)
        found.append(load_file(tmp_path / strategy / "model.safetensors"))
    assert_same(*found)
