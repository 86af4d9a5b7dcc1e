"""metrics.csv as the page reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fake_runs
import pytest

from snugfit._report import metrics
from snugfit._report.formatting import count, peak_range, percent, phase_label, predicted_peak, shorten
from snugfit._report.metrics import COLUMNS, Curve, curves, read_metrics
from snugfit.errors import CheckpointError

CSV = """phase,epoch,step,loss,accuracy,val_accuracy,lr,seconds,current_bytes,peak_bytes
a,0,1,2.0,0.1,,0.05,1.5,10,20
a,0,2,nan,oops,,0.05,3,10,20
a,0,,1.5,0.2,0.3,,3,,
b,0,1,1.0,0.4,,,4,,
b,0,2,0.5
"""


@pytest.fixture
def rows(tmp_path: Path):
    (tmp_path / "metrics.csv").write_text(CSV)
    return read_metrics(tmp_path / "metrics.csv")


def test_missing_file_gives_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.csv") == []


def test_columns_are_those_that_training_writes():
    assert list(COLUMNS) == fake_runs.COLUMNS


def test_empty_broken_and_infinite_cells_are_left_out(rows):
    assert [row.phase for row in rows] == ["a", "a", "a", "b", "b"]
    assert rows[1].values == {"epoch": 0, "step": 2, "lr": 0.05, "seconds": 3, "current_bytes": 10, "peak_bytes": 20}
    assert "seconds" not in rows[4].values


def test_step_and_epoch_rows_are_kept_apart(rows):
    assert curves(rows, "loss") == [Curve("a", [1.5], [2.0]), Curve("b", [4.0], [1.0])]
    assert curves(rows, "loss", epochs=True) == [Curve("a", [3.0], [1.5])]
    assert curves(rows, "val_accuracy", epochs=True) == [Curve("a", [3.0], [0.3])]


def test_steps_of_a_long_run_are_read_as_means(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MOST_BYTES", len(CSV))
    (tmp_path / "metrics.csv").write_text(CSV)
    first, epoch, last = read_metrics(tmp_path / "metrics.csv")
    assert (first.phase, first.values["loss"], first.values["step"], first.values["seconds"]) == ("a", 2.0, 1.5, 2.25)
    assert epoch.values == {"epoch": 0, "loss": 1.5, "accuracy": 0.2, "val_accuracy": 0.3, "seconds": 3}
    assert (last.phase, last.values["loss"], last.values["seconds"]) == ("b", 0.75, 4)


def test_thinning_takes_means():
    curve = Curve("a", [1, 2, 3, 4, 5], [10, 20, 30, 40, 50])
    assert curve.thinned(5) == curve
    assert curve.thinned(3) == Curve("a", [1.5, 3.5, 5], [15, 35, 50])
    assert curve.thinned(2) == Curve("a", [2, 4.5], [20, 45])


def test_words():
    assert [count(n) for n in (7, 1234, 14_728_266, 2.5e9)] == ["7", "1.23k", "14.7M", "2.5G"]
    assert percent(0.9046) == "90.5 %"
    assert percent(None) == "\N{EN DASH}"
    assert shorten("features.7-features.14", 11) == "featu\N{HORIZONTAL ELLIPSIS}es.14"
    assert phase_label("block 2/4 features.3") == "block 2/4"
    assert phase_label("block 2: features.3 to features.5") == "block 2"
    assert phase_label("exit selection") == "exit selection"
    assert peak_range(90_000_000, 30_000_000) == "60.0 to 90.0 MB" and peak_range(90_000_000, 0) == "90.0 MB"
    assert peak_range(90_000_000, 1000) == "90.0 MB"
    assert peak_range(1_200_000_000, 300_000_000) == "900.0 MB to 1.2 GB"


def test_a_predicted_peak_goes_from_what_a_run_needs_to_what_it_may_keep():
    record = fake_runs.blockwise(Path("runs/1"))
    assert predicted_peak(record) == "98.6 MB"
    first, *others = record.phases
    widened = replace(first, predicted_peak_bytes=98_600_000, predicted_kept_bytes=60_000_000)
    needed = max(phase.predicted_peak_bytes for phase in others)
    assert predicted_peak(replace(record, phases=[widened, *others])) == peak_range(98_600_000, 98_600_000 - needed)


@pytest.mark.parametrize("cell", ["x" * 200_000, '"' + "x,\n" * 100_000])
def test_a_cell_without_end_is_refused(tmp_path, cell):
    (tmp_path / "metrics.csv").write_text(CSV + cell)
    with pytest.raises(CheckpointError, match=r"metrics\.csv is damaged \("):
        read_metrics(tmp_path / "metrics.csv")
