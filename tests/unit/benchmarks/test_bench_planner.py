"""The claims about plans, peers and foreign networks: ranking, summaries, lanes, and how long snugfit trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import common, newcomer, peers, peers_tables, planner, planner_tables, store
from hypothesis import given
from hypothesis import strategies as st

NUMBERS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=8)


def cell(arm: str, strategy: str, memory: str = "100MB", **more: Any) -> dict[str, Any]:
    settings = {"model": "vgg8", "data": "digits", "strategy": strategy, "memory": memory}
    return {"arm": arm, "settings": settings, "exit_code": 0, "seconds": 1.0, "commit": "abc", **more}


def refused_plan(strategy: str, smallest: int | None) -> dict[str, Any]:
    return cell("plan", strategy, exit_code=3, candidate={"smallest_bytes": smallest})


def run(strategy: str, predicted: float, measured: float, peak: int = 90, **settings: Any) -> list[dict[str, Any]]:
    phases = [
        {"predicted_seconds": predicted, "seconds": measured, "steps": 4},
        {"predicted_seconds": 9, "seconds": 1, "steps": 0},
    ]
    record = {
        "budget": {"memory_bytes": 100_000_000},
        "predicted": {"peak_bytes": 95_000_000},
        "measured": {"peak_bytes": peak * 1_000_000},
        "phases": phases,
        "settings": settings,
    }
    return [cell("plan", strategy), cell("train", strategy, record=record)]


class TestTau:
    def test_by_hand(self) -> None:
        assert planner_tables.kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
        assert planner_tables.kendall_tau([1, 2, 3], [3, 2, 1]) == -1
        assert planner_tables.kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)

    def test_a_ranking_that_tells_nothing_apart(self) -> None:
        assert planner_tables.kendall_tau([1, 1, 1], [1, 2, 3]) is None
        assert planner_tables.kendall_tau([], []) is None

    @given(NUMBERS)
    def test_as_scipy_has_it(self, pairs: list[tuple[int, int]]) -> None:
        stats = pytest.importorskip("scipy.stats")
        first, second = zip(*pairs, strict=True)
        found = planner_tables.kendall_tau(first, second)
        if found is None:
            assert len(set(first)) == 1 or len(set(second)) == 1
        else:
            assert found == pytest.approx(stats.kendalltau(first, second).statistic)


class TestConclusions:
    def test_everything_held(self) -> None:
        cells = [*run("backprop", 10, 11), *run("checkpoint", 13, 14), *run("tiled", 20, 20)]
        cells += [refused_plan("elastic", 5), cell("refused", "elastic", outcome={"refused": True})]
        lines = planner_tables.conclusions(cells)
        assert lines[0] == "cells: 3 run, 1 infeasible, 0 not served, 0 failed or not run"
        assert lines[1].startswith("measured peak within the budget: 3 of 3; within the prediction: 3 of 3")
        assert "100.0 %" in lines[2]
        assert "1.00 on average over 1" in lines[3]
        assert "7.1 %" in lines[4]
        assert "smallest setting: 1 of 1; of backprop, checkpoint, blockwise: 0 of 0" in lines[5]

    def test_checkpointing_that_recomputes_nothing_is_not_ranked_beside_backpropagation(self) -> None:
        same, others = run("checkpoint", 9, 12, recomputation="0-3"), [*run("backprop", 10, 11), *run("tiled", 20, 20)]
        cells = [*others, *run("blockwise", 15, 16)]
        assert planner_tables.rank_agreement([*same, *cells]) == planner_tables.rank_agreement(cells) == [1]
        slower = run("checkpoint", 9, 12, recomputation="(0-1) 2-3")
        assert planner_tables.rank_agreement([*slower, *cells]) == [pytest.approx(4 / 6)]

    def test_what_did_not_hold_is_counted(self) -> None:
        cells = [*run("backprop", 10, 10, peak=99), *run("tiled", 20, 5, peak=101), refused_plan("blockwise", 5)]
        cells += [cell("refused", "blockwise", outcome={"refused": False}), cell("plan", "elastic", exit_code=1)]
        lines = planner_tables.conclusions(cells)
        assert lines[0] == "cells: 2 run, 1 infeasible, 0 not served, 1 failed or not run"
        assert "1 of 2; within the prediction: 0 of 2" in lines[1]
        assert "over 0" in lines[3]
        assert "0 of 1; of backprop, checkpoint, blockwise: 0 of 1" in lines[5]

    def test_no_bytes_would_do_for_what_does_not_serve(self) -> None:
        assert planner_tables.is_unserved(refused_plan("sidenet", None))
        assert not planner_tables.is_unserved(refused_plan("sidenet", 7))
        assert planner_tables.is_unserved(cell("plan", "sidenet", exit_code=4, error={"type": "ModelError"}))

    def test_table(self) -> None:
        cells = [*run("backprop", 10, 11), refused_plan("tiled", 5), refused_plan("sidenet", None)]
        text = planner_tables.render(cells)
        assert "| vgg8 | backprop | 95.0 / 90.0, 10.0 / 11.0 s |" in text
        assert "| vgg8 | tiled | no? |" in text
        assert "| vgg8 | sidenet | - |" in text

    def test_time_of_planning(self) -> None:
        states = {"start": 2.0, "cold": 12.0, "cached": 3.0}
        cells = [cell("speed", "auto", state=state, repeat=0) | {"seconds": value} for state, value in states.items()]
        assert "| vgg8 | digits | 100MB | 2.0 | 12.0 | 3.0 | 10.0 | 1 |" in planner_tables.render(cells)


def test_lanes_share_the_work() -> None:
    items = tuple((model, way) for model in "abc" for way in "xyz")
    lanes = [planner.share(items, f"{number}/2") for number in range(2)]
    assert sorted(lanes[0] + lanes[1]) == sorted(items)
    assert planner.share(items, "0/1") == items


def test_two_lanes_fill_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for lane in ("0/2", "1/2"):
        monkeypatch.setattr(sys, "argv", ["x", "--lane", lane])
        files.append(store.ResultFile("planner", common.Options(results=tmp_path / "planner.json")))
    for command, results in zip("abc", (files[0], files[1], files[0]), strict=True):
        results.once(command, lambda: {"exit_code": 0, "seconds": 1.0})
    data = store.load(tmp_path / "planner.json")
    assert [each["command"] for each in data["cells"]] == ["a", "b", "c"]
    assert [command[-3:] for command in data["commands"]] == ["0/2", "1/2"]


class TestPeers:
    def test_epochs_fill_the_time(self) -> None:
        assert peers.passes(35.0, 10.0, 2560, 64) == (4, 2240)
        assert peers.passes(30.0, 10.0, 2560, 64) == (3, 2560)
        assert peers.passes(5.0, 10.0, 2560, 64) == (1, 1280)
        assert peers.passes(0.001, 10.0, 2560, 64) == (1, 64)

    def test_what_fits_and_takes_the_least_time_in_all_is_taken(self) -> None:
        def candidate(seconds: float, *, feasible: bool = True) -> dict[str, Any]:
            return {"feasible": feasible, "predicted": {"seconds": seconds, "seconds_per_epoch": -seconds}}

        one, two, three = candidate(3.0), candidate(1.0), candidate(0.5, feasible=False)
        assert peers.choose([one, two, three]) is two
        assert peers.choose([three]) is None

    def test_steps_of_fewer_images_than_a_batch_are_scaled_to_one(self) -> None:
        record = dict.fromkeys(planner_tables.KEPT, "") | {
            "budget": {"memory_bytes": 100},
            "measured": {"peak_bytes": 90, "seconds": 7.0},
            "accuracy": {"test": 0.5},
            "phases": [{"steps": 40, "seconds": 6.0}],
        }
        ran = {"record": record, "steps": 40, "step_seconds": 0.1}
        told = peers._told(ran, 5.0, {"max_train": 160, "batch_size": 8}, 80)["outcome"]
        assert told["step_seconds"] == pytest.approx(0.4), "two images a step"
        assert told["seconds_per_epoch"] == pytest.approx(12.0) and told["used_seconds"] == 12.0

    def test_rows(self) -> None:
        settings = {"model": "vgg8", "data": "digits", "memory": "100MB", "max_train": 2560, "batch_size": 64}
        outcome = {
            "failure": None,
            "within": True,
            "peak_bytes": 9e7,
            "micro_batch": 8,
            "accuracy": 0.25,
            "images": 640,
        }
        cells = [
            *({"way": "micro", "outcome": {**outcome, "step_seconds": step}} for step in (0.3, 0.4, 0.9)),
            {"way": "plain", "outcome": {"failure": "RuntimeError: x", "refused": True}},
            {"way": "lightning", "outcome": {"missing": "lightning"}},
        ]
        text = peers_tables.render([{**each, "arm": "peer", "settings": settings, "time": 60.0} for each in cells])
        assert "| micro-batches by halving | yes | 90.0 | micro-batch 8 | - | - | 0.40 | 640 | - |" in text
        assert "no: refused memory (RuntimeError: x)" in text
        assert "not measured: no lightning" in text


def test_foreign_networks_show_where_they_stopped() -> None:
    told = {"strategy": "backprop", "predicted": 95e6, "measured": 9e7}
    steps = {
        "plan": {"exit_code": 0, "seconds": 9.0, "told": {}},
        "train": {"exit_code": 0, "seconds": 20.0, "told": told},
        "evaluate": {"exit_code": 4, "seconds": 1.0, "error": {"message": "no"}},
    }
    settings = {"model": "timm:x", "memory": "200MB", "image_size": 64}
    text = newcomer.render([{"arm": "newcomer", "settings": settings, "steps": steps}])
    assert text.endswith("| timm:x, 64 pixels | 200MB | backprop | 95.0 / 90.0 | 9 s | 20 s | exit 4: no | - |")


def test_a_newcomer_installs_as_the_readme_says() -> None:
    command = newcomer.installation(common.ROOT, "python3.12")
    assert command.startswith("python3.12 -m venv .venv && .venv/bin/pip install torch==")
    assert command.endswith(f' "{common.ROOT}[demo]"')


def test_a_newcomers_paths_are_rows_of_medians() -> None:
    labels = {"arm": "path", "path": "photos", "source": "abc", "exit_code": 0, "load": 2.0, "seconds": 30.0}
    told = {"strategy": "elastic", "measured": 6e7}
    seeds = zip((10.0, 30.0, 11.0), (0.8, 0.9, 0.85), strict=True)
    cells = [{**labels, "processor_seconds": s, "told": {**told, "accuracy": found}} for s, found in seeds]
    script = {**labels, "path": "loop", "processor_seconds": 5.0, "told": {"lines": ["x"]}}
    *_, photos, loop = newcomer.render([*cells, script, {**labels, "exit_code": 1}]).splitlines()
    assert photos == "| photos | abc | 3 | 11 s | 30 s | 2 | elastic | 85.0 % (80.0 % - 90.0 %) | 60.0 |"
    assert loop == "| loop | abc | 1 | 5 s | 30 s | 2 | - | - | - |"
