"""Accuracy over seconds of the queue's runs, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.queue import page
from benchmarks.queue.arms import CAPPED, Arm
from benchmarks.queue.curves import curve_of, reached, with_spread
from benchmarks.queue.rungs import Row, Task
from benchmarks.queue.runner import row_of


def line(phase: str, seconds: float, val: float | None = None) -> dict[str, str]:
    return {"phase": phase, "epoch": "0", "seconds": str(seconds), "val_accuracy": "" if val is None else str(val)}


def phase(name: str, seconds: float, *units: str) -> dict[str, object]:
    return {"name": name, "seconds": seconds, "units": units}


def test_epochs_share_the_seconds_of_their_phase_by_their_steps_after_profiling() -> None:
    record = {"overhead_seconds": {"profiling": 10.0, "statistics": 3.0}, "phases": [phase("network", 40.0)]}
    metrics = [line("network", 4), line("network", 5, 0.25), line("network", 15), line("network", 20, 0.5)]
    assert curve_of(record, metrics) == [(20.0, 0.25), (50.0, 0.5)]


def test_blocks_give_the_best_exit_until_their_end() -> None:
    record = {
        "overhead_seconds": {"profiling": 1.0},
        "phases": [phase("block 1", 10.0, "a", "b..c"), phase("block 2", 20.0, "d"), phase("exit", 5.0)],
        "exits": [{"unit": unit, "val_accuracy": val} for unit, val in (("a", 0.2), ("c", 0.4), ("d", 0.3))],
    }
    assert curve_of(record, [line("block 1", 9), line("block 2", 27)]) == [(11.0, 0.4), (31.0, 0.4)]


def test_a_run_that_failed_has_no_curve() -> None:
    assert curve_of({}, [line("network", 5, 0.25)]) == []


@pytest.mark.parametrize(("seconds", "value"), [(9.9, None), (10, 0.3), (19, 0.3), (29, 0.3), (50, 0.4)])
def test_the_best_point_by_a_time_counts(seconds: float, value: float | None) -> None:
    assert reached([(10.0, 0.3), (20.0, 0.2), (30.0, 0.4)], seconds) == value


def test_a_peer_reports_its_own_curve() -> None:
    record = {"curve": [[3.0, 0.5]], "training_seconds": 2.5, "measured": {"seconds": 4.0}}
    row = row_of(Task(TestPage.free, 0, 0), "d", "abc", 0, record, [])
    assert (row["curve"], row["training_seconds"], row["seconds"]) == ([[3.0, 0.5]], 2.5, 4.0)


def test_spread_is_the_standard_deviation_of_a_sample() -> None:
    assert [with_spread(each) for each in ([], [0.5], [0.5, 0.6, 0.7])] == ["-", "50.0", "60.0 ± 10.0"]


class TestPage:
    free, capped, tight = (
        Arm(f"{CAPPED}, net", name, {"strategy": "backprop", "model": "net", **more}, 45_000, 50, 1)
        for name, more in (
            ("no cap: backprop", {}), ("9 MB: units", {"memory": "9MB"}), ("2 MB: units", {"memory": "2MB"})
        )
    )  # fmt: skip

    def row(self, arm: Arm, seed: int, test: float, *ends: float) -> Row:
        """A run of two phases that end at these seconds, with exits of 20 and 40 percent."""
        seconds = [end - start for start, end in zip((0.0, *ends), ends, strict=False)]
        record = {
            "accuracy": {"val": 0.4, "test": test}, "measured": {"peak_bytes": 5_000_000, "seconds": ends[-1]},
            "phases": [phase(str(index), each, str(index)) for index, each in enumerate(seconds)],
            "exits": [{"unit": str(index), "val_accuracy": 0.2 + 0.2 * index} for index in range(len(seconds))],
        }  # fmt: skip
        return row_of(Task(arm, 0, seed), "d", "abc", 0, record, [])

    def shown(self, *rows: Row) -> dict[str, list[str]]:
        text = page.page([self.free, self.capped, self.tight], {row["key"]: row for row in rows})
        assert text.count("### short rung: 2,000 images, 10 epochs") == 1
        lines = [each.strip("| ").split(" | ") for each in text.splitlines() if each.startswith("| ")]
        return {cells[0]: cells for cells in lines}

    def test_arms_are_compared_at_equal_epochs_and_equal_seconds(self) -> None:
        lack = {"error": {"message": "needs 3 MB"}}
        shown = self.shown(
            self.row(self.free, 0, 0.5, 40.0, 90.0), self.row(self.free, 1, 0.6, 60.0, 110.0),
            self.row(self.capped, 0, 0.5, 40.0, 150.0), self.row(self.capped, 1, 0.5, 80.0, 170.0),
            row_of(Task(self.tight, 0, 0), "d", "abc", 3, lack, []),
        )  # fmt: skip
        assert shown["no cap: backprop"][2:9] == [
            "2", "55.0 ± 7.1", "0.0", "40.0 ± 0.0", "40.0 ± 0.0", "-", "100",
        ], "T is 110 seconds; after half of it the second seed has no exit yet"  # fmt: skip
        assert shown["9 MB: units"][2:9] == ["2", "50.0 ± 0.0", "-5.0", "40.0 ± 0.0", "20.0 ± 0.0", "-", "160"]
        assert shown["2 MB: units"][2:5] == ["1", "exit 3: needs 3 MB", "-"]

    def test_without_the_uncapped_arm_there_is_nothing_to_compare_with(self) -> None:
        shown = self.shown(self.row(self.capped, 0, 0.5, 40.0, 150.0))
        assert shown["9 MB: units"][2:9] == ["1", "50.0", "-", "40.0", "-", "-", "150"]

    def test_images_of_a_step_are_told_with_the_modules(self) -> None:
        """Without them a single module, which is exact, would pass for local learning."""
        blocks = self.row(self.capped, 0, 0.5, 40.0) | {
            "chosen": {"blocks": [[0, 1, 19], [2, 2, 64]], "modules": [0, 1]}
        }
        free = self.row(self.free, 0, 0.5, 90.0) | {"chosen": {"micro_batch": 32, "micro_batches": 4}}
        shown = self.shown(free, blocks, self.row(self.tight, 0, 0.5, 9.0))
        assert [cells[10] for cells in shown.values()][-3:] == ["128", "19 + 64 in 2 modules", "-"]

    def test_rows_of_former_settings_are_marked_until_there_are_others(self) -> None:
        changed = replace(self.capped, settings=self.capped.settings | {"keep": "best"})
        former, present = self.row(self.capped, 0, 0.5, 40.0, 150.0), self.row(changed, 0, 0.6, 40.0, 140.0)
        before, after = (
            page.page([self.free, changed], {row["key"]: row for row in rows})
            for rows in ([former], [former, present])
        )  # fmt: skip
        assert "| 9 MB: units * | default | 1 | 50.0 |" in before
        assert "| 9 MB: units | default | 1 | 60.0 |" in after and "units *" not in after

    def test_seeds_of_different_sources_are_told(self) -> None:
        """Their spread is not one of seeds alone."""
        first, second = (self.row(self.capped, seed, 0.5, 40.0) for seed in (0, 1))
        shown = [self.shown(first, second | {"digest": other})["9 MB: units"][2] for other in ("d", "e")]
        assert shown == ["2", "2 (2 programs)"]

    def test_the_longest_rung_is_drawn_for_the_page(self, tmp_path: Path) -> None:
        rows = [self.row(self.free, 0, 0.5, 40.0, 90.0), self.row(self.capped, 1, 0.5, 40.0, 150.0)]
        arms = [self.free, self.capped, self.tight]
        assert page.curves_of(arms, rows) == {
            "no cap": {"backprop": [[(40.0, 0.2), (90.0, 0.4)]]}, "9 MB": {"units": [[(40.0, 0.2), (150.0, 0.4)]]},
        }  # fmt: skip
        (path,) = page.write_figures(arms, rows, tmp_path)
        assert f"](figures/{path.name})" in page.page(arms, {row["key"]: row for row in rows})
        drawn = path.read_text()
        assert ">9 MB<" in drawn and ">backprop, no cap<" in drawn
        page.write_figures(arms, rows, tmp_path)
        assert path.read_text() == drawn

    def test_without_rows_nothing_is_drawn(self, tmp_path: Path) -> None:
        assert page.write_figures([self.free], [], tmp_path) == []
