"""The measurement of exits."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import exits
from benchmarks.common import Cell, Settings

import snugfit

SETTINGS: Settings = {
    "model": "resnet20", "data": "digits", "max_train": 64, "max_val": 40, "epochs": 1, "lr": 0.05, "seed": 0,
    "batch_size": 32, "strategy": "blockwise", "module_units": "1", "threads": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"local_loss": "aan"}, pytest.param({"local_loss": "lls-mxm", "block_units": 2}, marks=pytest.mark.slow)],
)
def test_exits_are_as_accurate_from_images_as_in_the_run(tmp_path: Path, changes: Settings) -> None:
    settings = {**SETTINGS, **changes}
    record = snugfit.plan(**settings, memory="300MB", out=tmp_path / "run").run()
    again = exits.evaluate(tmp_path / "run", settings, None)
    assert again["val"] == pytest.approx([each.val_accuracy for each in record.exits], abs=1e-6)
    assert {name: len(values) for name, values in again.items()} == {"val": 10, "test": 10, "test_all": 10}


def test_an_exit_falls_behind_the_best_shallower_one_only_by_more_than_a_standard_error() -> None:
    assert exits.falls([0.5, 0.4, 0.49, 0.6, 0.55], 100) == pytest.approx([0.1, 0.05], abs=1e-9)
    assert exits.falls([0.1, 0.2, 0.3], 100) == []


def cell(arm: str, values: list[float], seed: int = 0) -> Cell:
    found = [
        {"unit": f"u{i}", "index": i, "val_accuracy": value, "parameters": 10 * (i + 1)}
        for i, value in enumerate(values)
    ]
    settings = {**SETTINGS, "max_val": 400, "seed": seed, "local_loss": "aan"}
    again = {"val": values, "test": values, "test_all": values}
    record = {"exits": found, "measured": {"seconds": 2.0}}
    return {"arm": arm, "settings": settings, "record": record, "again": again}


def test_arms_with_the_same_exits_share_a_table_and_each_tolerance_has_a_row() -> None:
    text = exits.render([cell(exits.ONE, [0.2, 0.3]), cell(exits.CACHED, [0.2, 0.5]), cell(exits.STOPPED, [0.2, 0.5])])
    assert f"aan, {exits.CACHED} or {exits.STOPPED} (seeds 0; means)" in text and text.count("| exit |") == 2
    assert text.count("| aan |") == 9 and "| u1 | 50.0 % | 50.0 % | 50.0 % |" in text
