"""Networks with every normalisation but BatchNorm, in every strategy: torch's GroupNorm crashes where it may."""

from __future__ import annotations

from typing import Any

import pytest
from row_runs import PREPARED, run_rows, selected, table

ROWS: dict[str, dict[str, Any]] = {
    "backprop": {"strategy": "backprop"},
    "checkpoint": {"strategy": "checkpoint"},
    "aan": {"strategy": "blockwise", "module_units": "1"},
    "lls-mxm": {"strategy": "blockwise", "module_units": "1", "local_loss": "lls-mxm"},
    "elastic": {"strategy": "elastic"},
    "elastic, stock": {"strategy": "elastic", "lean": False},
    "head": {"strategy": "elastic", "scheme": "head"},
    "bn+bias": {"strategy": "elastic", "scheme": "bn+bias"},
    "rep-net": {"strategy": "sidenet"},
    "bias+head": {"strategy": "sidenet", "scheme": "bias+head"},
    "tiles": {"strategy": "tiled", "tiles": "2x2", "model": "tiny_nets:late_normed"},
    "dfa": {"strategy": "feedback"},
    "pepita": {"strategy": "feedback", "feedback_rule": "pepita", "model": "tiny_nets:single_normed"},
}

SCRIPT = (
    PREPARED
    + """
for name, options in rows.items():
    options = {"image_size": 16, "model": "tiny_nets:group_normed", **options}
    plan = snugfit.plan(options.pop("model"), "digits", snugfit.Budget(memory=60_000_000), epochs=1,
                        max_train=64, max_val=20, batch_size=32, **options)
    record = plan.run((), out=f"{folder}/{name}")
    seen[name] = {"measured": record.measured["peak_bytes"], "predicted": record.predicted["peak_bytes"]}
json.dump(seen, open(f"{folder}/found.json", "w"))
"""
)


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every selected row, run once outside the process of the tests."""
    return run_rows(SCRIPT, selected(request, ROWS), tmp_path_factory.mktemp("runs"), timeout=300)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("row", table(ROWS, ("lls-mxm", "elastic")))
def test_it_trains_within_its_prediction(seen: dict[str, Any], row: str) -> None:
    assert 0 < seen[row]["measured"] <= seen[row]["predicted"] <= 60_000_000


def test_every_registered_strategy_has_a_row() -> None:
    from snugfit._core.registry import strategies

    assert {row["strategy"] for row in ROWS.values()} == set(strategies())
