"""Smallest memory: the bisection against a full search, and the table."""

from __future__ import annotations

from typing import Any

import pytest
from bench_cells import finished, infeasible
from benchmarks import floors

EXACT = {"optimizer_state": "float32", "model": "vgg8"}


@pytest.mark.parametrize("guess", [1, 90, 160, 161, 400])
@pytest.mark.parametrize("smallest", [1, 3, 49, 160, 161, 397])
def test_bisection_ends_at_most_its_resolution_above_the_smallest(smallest: int, guess: int) -> None:
    tried: list[int] = []

    def fits(value: int) -> bool:
        assert value > 0
        tried.append(value)
        return value >= smallest

    found = floors.bisect(fits, guess)
    assert 0 <= found - smallest < floors.resolution(found)
    assert found in tried
    assert len(set(tried)) == len(tried)
    assert len(tried) <= 18


def test_a_good_guess_needs_few_tries() -> None:
    tried: list[int] = []
    floors.bisect(lambda value: tried.append(value) or value >= 159, 160)  # type: ignore[func-returns-value]
    assert len(tried) <= 3


def ours(memory: str, **more: Any) -> list[dict]:
    """A hopeless budget and the run at the one that it names."""
    refused = infeasible("backprop", memory="10MB", smallest=memory)
    refused["settings"] |= more
    run = finished("backprop", 9.0, memory="100000000", **more)
    return [refused, {**run, "named": True}]


def peer(cap_mb: int, failure: str | None = None) -> dict:
    outcome = {"failure": failure, "within": True, "peak_bytes": 150_400_000, "cap_bytes": cap_mb * 10**6}
    settings = {"model": "vgg8", "batch_size": 2}
    return {"way": "plain", "settings": settings, "outcome": {**outcome, "rest_bytes": 170_000_000}, "exit_code": 0}


def rows(cells: list[dict]) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in floors.render(cells).splitlines() if line.startswith("| ")]
    return {f"{line[0]}:{line[2]}": line for line in lines}


def test_the_table_has_the_named_budget_and_what_the_run_in_it_measured() -> None:
    row = rows(ours("100.0 MB", **EXACT))["snugfit backprop:8"]
    assert row[3:] == ["100.0", "-", "100.0, 90.0", "not measured", "-"]


def test_a_run_above_its_prediction_is_no_floor() -> None:
    refused, run = ours("100.0 MB", **EXACT)
    run["record"]["measured"]["peak_bytes"] = 100_000_001
    text = floors.render([refused, run])
    assert "100.0, not tried" not in text
    assert "| 100.0, not kept |" in text
    assert "budgets: 0 of 1 runs" in text
    assert "vgg8: snugfit exact -" in text


def test_cells_of_the_time_before_the_options_have_a_column() -> None:
    older = ours("120.0 MB", model="vgg8")
    row = rows([*ours("100.0 MB", **EXACT), *older])["snugfit backprop:8"]
    assert row[3:5] == ["100.0", "120.0"]


def test_the_total_is_named_by_its_own_error() -> None:
    refused, run = ours("290.0 MB", **EXACT)
    refused["error"]["message"] = "vgg8 does not fit. Smallest --total-memory that would do: 290.0 MB."
    for cell in (refused, run):
        cell["settings"]["total_memory"] = cell["settings"].pop("memory")
    for part, count in {"budget": 290, "predicted": 290, "measured": 280}.items():
        run["record"][part]["total_memory_bytes"] = count * 10**6
    assert rows([refused, run])["snugfit backprop:8"][3:] == ["not measured", "-", "-", "290.0", "280.0"]


def test_the_floor_of_another_way_is_the_smallest_cap_that_trained() -> None:
    found = rows([peer(6000), peer(160), peer(152), peer(150, "RuntimeError: refused")])
    assert found["plain PyTorch:2"][3:] == ["152.0", "-", "-, 150.4", "322.0", "320.4"]
    assert "plain PyTorch:16" not in found
    assert "; plain PyTorch with 16 images; checkpoint_sequential" in floors.render([peer(160)])


def test_the_smallest_of_other_ways_is_said_for_each_kind_of_gradients() -> None:
    text = floors.render([peer(160), peer(152), {**peer(120), "way": "bitsandbytes"}])
    assert "snugfit exact -, other ways exact 152.0, snugfit nearly exact -, other ways nearly exact 120.0" in text


def test_a_way_that_never_trains_says_why() -> None:
    assert rows([peer(6000, "ValueError: why")])["plain PyTorch:2"][3] == "failed: ValueError: why"
    missing = {**peer(6000), "outcome": {"missing": "bitsandbytes"}, "way": "bitsandbytes"}
    assert rows([missing])[f"{floors.PEERS['bitsandbytes:2']}:2"][3] == "not installed"
