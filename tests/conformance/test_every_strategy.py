"""One table for every strategy and its settings: what each run must hold, under an enforced budget, end to end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny_boxes
from row_runs import PREPARED, run_rows, selected, table
from strategy_rows import ROWS

BUDGET = 60_000_000
SLOW = (
    "aan",  # also in test_every_local_loss.py, like all local losses
    "classic",
    "linear",
    "adamw",  # also in test_elastic_runs.py
    "pruned",  # "pruned, state in 16 bits"
    "lls",
    "lls-m",
    "lls-mxm",
    "schedulefree",  # also in test_kept_epoch_runs.py
    "full",  # also in test_elastic_runs.py
    "head",  # also in test_group_norm.py
    "bn+bias",  # so is this
    "prunetrain",  # "pruned, state in 16 bits"
    "bias+head",  # also in test_group_norm.py
    "tiles",  # "tiles, maps in files"
    "whole-batch norms",  # the test of the divided batch
    "boxes, recomputed",
    "boxes in tiles",
    "whole, state in 8 bits",  # "weights in 16 bits"
    "recomputed, weights in 16 bits",
    "units, state in 8 bits",
    "selected, state in 8 bits",
    "side network, state in 8 bits",
    "tiles, state in 8 bits",
    "clipped",  # "clipped, recomputed"
    "in float16",  # "in float16, recomputed"
    "averaged weights",  # "averaged weights, recomputed"
    "weighted classes",  # also in test_same_training.py
    "checkpoint",  # "clipped, recomputed" and others
    "feature maps in 8 bits",  # also in test_same_training.py
    "dfa",  # also in test_group_norm.py, like "pepita"
    "pepita",
)
"""Rows whose settings quick rows have, too: what is left to them is the combination."""
TABLE = table(ROWS, SLOW)

SCRIPT = (
    PREPARED
    + """
for name, options in rows.items():
    budget = snugfit.Budget(memory=options.pop("memory", 60_000_000), time_ratio=options.pop("time_ratio", None))
    own = {"rho": 0.2} if options["strategy"] == "blockwise" else {}
    options = {"image_size": 16, **own, **options}
    model, data = options.pop("model", "tiny_nets:cnn"), options.pop("data", "digits")
    plan = snugfit.plan(model, data, budget, epochs=1,
                        max_train=96, max_val=40, batch_size=32, **options)
    record = plan.run((), out=f"{folder}/{name}")
    accuracy = snugfit.evaluate(record.run_dir)["accuracy"]
    seen[name] = {"record": record.to_json(), "evaluated": accuracy,
                  "parameters": sum(p.numel() for p in record.model.parameters())}
json.dump(seen, open(f"{folder}/found.json", "w"))
"""
)


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every selected row, run once outside the process of the tests."""
    boxes = tiny_boxes.write_yolo(tmp_path_factory.mktemp("data"), (("train", 64), ("val", 8), ("test", 8)), size=32)
    rows = {name: {**row, "data": str(boxes)} if row.get("data") == "boxes" else row for name, row in ROWS.items()}
    return run_rows(SCRIPT, selected(request, rows), tmp_path_factory.mktemp("runs"), timeout=600)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("row", TABLE)
def test_memory_stays_within_budget_and_prediction(seen: dict[str, Any], row: str) -> None:
    record = seen[row]["record"]
    assert record["enforced"] is True
    assert 0 < record["measured"]["peak_bytes"] <= BUDGET
    assert record["measured"]["peak_bytes"] <= record["predicted"]["peak_bytes"] <= BUDGET
    for phase in record["phases"]:
        assert phase["measured_peak_bytes"] <= phase["predicted_peak_bytes"], phase["name"]


@pytest.mark.timeout(700)
def test_whole_batch_norms_divide_the_batch(tmp_path: Path) -> None:
    """In a process of its own: others leave memory behind, and the whole batch of 32 must just not fit."""
    row = {"strategy": "backprop", "batch_norm": "exact", "image_size": 64, "memory": 22_000_000}
    record = run_rows(SCRIPT, {"norms": row}, tmp_path, timeout=600)["norms"]["record"]
    assert record["settings"]["whole_batch"] and record["settings"]["micro_batches"] > 1
    assert record["settings"]["micro_batches"] == math.ceil(32 / record["settings"]["micro_batch"])
    assert record["measured"]["peak_bytes"] <= record["predicted"]["peak_bytes"] <= row["memory"]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("row", TABLE)
def test_the_record_tells_of_the_model_that_was_kept(seen: dict[str, Any], row: str) -> None:
    record = seen[row]["record"]
    assert seen[row]["evaluated"] == pytest.approx(record["accuracy"]["test"], abs=1e-9)
    assert seen[row]["parameters"] == record["parameters"]["trained_model"] <= record["parameters"]["full"] * 100
    if record["exit"] is not None:
        chosen = next(each for each in record["exits"] if each["index"] == record["exit"]["index"])
        assert chosen["unit"] == record["exit"]["unit"] and chosen["parameters"] == seen[row]["parameters"]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("row", TABLE)
def test_statistics_are_taken_anew_where_norms_train(seen: dict[str, Any], row: str) -> None:
    """In ``elastic`` and in a frozen backbone norms keep to those that they came with."""
    options = ROWS[row]
    frozen = options["strategy"] == "elastic" or options.get("scheme") in ("head", "bias+head")
    assert ("statistics" in seen[row]["record"]["overhead_seconds"]) is not frozen


def test_every_registered_strategy_has_a_row() -> None:
    from snugfit._core.registry import strategies

    assert {row["strategy"] for row in ROWS.values()} == set(strategies())
