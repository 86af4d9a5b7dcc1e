"""metrics.csv: its rows, and their agreement with the checkpoint that a run resumes from."""

import csv
import tracemalloc
from pathlib import Path

import pytest

from snugfit._training.events import EpochDone, Notice, StepDone
from snugfit._training.metrics import COLUMNS, MetricsWriter
from snugfit.errors import OutOfStorageError


def step(number, seconds=0.5, epoch=0, phase="block 1: a, b"):
    return StepDone(phase, epoch, number, 4, 1 / 3, 0.25, 0.05, seconds, 1000, 2000, 8)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def writer(tmp_path):
    return MetricsWriter(tmp_path / "metrics.csv")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
def test_a_full_disk_is_one_clear_error():
    with pytest.raises(OutOfStorageError, match="no space left on the device while writing /dev/full"):
        MetricsWriter(Path("/dev/full"))(step(1))


def test_rows_by_hand(writer):
    for event in (step(1), Notice("not a row"), step(2), EpochDone("block 1: a, b", 0, 3, 0.3, 0.5, 0.75, 9.0)):
        writer(event)
    first, second, epoch = rows(writer.path)
    assert tuple(first) == COLUMNS
    assert list(first.values()) == [
        "block 1: a, b",
        "0",
        "1",
        "0.333333",
        "0.25",
        "",
        "0.05",
        "0.5",
        "1000",
        "2000",
        "",
    ]
    assert second["seconds"] == "1"
    assert list(epoch.values()) == ["block 1: a, b", "0", "", "0.3", "0.5", "0.75", "", "1", "", "", ""]


def test_map50_stands_in_both_columns_and_training_has_no_accuracy(writer):
    writer(StepDone("p", 0, 1, 4, 2.5, None, 0.05, 0.5, 1000, 2000, 8))
    writer(EpochDone("p", 0, 3, 2.5, None, 0.75, 9.0, "mAP50"))
    step_row, epoch = rows(writer.path)
    assert (step_row["accuracy"], step_row["map50"]) == ("", "")
    assert (epoch["accuracy"], epoch["val_accuracy"], epoch["map50"]) == ("", "0.75", "0.75")


def test_an_epoch_without_validation(writer):
    writer(EpochDone("p", 0, 1, 0.3, 0.5, None, 9.0))
    assert rows(writer.path)[0]["val_accuracy"] == ""


def test_nothing_is_written_before_there_is_something(writer):
    assert writer.offset() == 0
    writer.truncate(0)
    writer(Notice("x"))
    assert not writer.path.exists()


def test_truncated_to_an_offset(writer):
    for number in (1, 2):
        writer(step(number))
    offset = writer.offset()
    for number in (3, 4):
        writer(step(number, seconds=5.0))
    again = MetricsWriter(writer.path)
    again.truncate(offset)
    assert [row["step"] for row in rows(writer.path)] == ["1", "2"]
    again(step(3))
    assert [(row["step"], row["seconds"]) for row in rows(writer.path)] == [("1", "0.5"), ("2", "1"), ("3", "1.5")]


def test_a_long_run_resumes_in_little_memory(writer):
    """80,000 steps are an hour of a small network; read at once they took 70 MB, which a budget of 21 MB lacks."""
    writer(step(1))
    header, row = writer.path.read_text().splitlines(keepends=True)
    writer.path.write_text(header + 80_000 * row + row.replace("0.5", "40000"))
    tracemalloc.start()
    try:
        writer.truncate(writer.offset())
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    writer(step(2))
    assert rows(writer.path)[-1]["seconds"] == "40000.5"


def test_truncated_to_nothing_it_begins_with_its_header(writer):
    writer(step(1))
    writer.truncate(0)
    writer(step(1, seconds=2.0))
    assert [(row["step"], row["seconds"]) for row in rows(writer.path)] == [("1", "2")]


def test_a_file_cut_in_the_middle_of_a_row_is_cut_back_to_the_checkpoint(writer):
    writer(step(1))
    offset = writer.offset()
    writer(step(2))
    writer.path.write_bytes(writer.path.read_bytes()[:-7])
    writer.truncate(offset)
    assert [row["step"] for row in rows(writer.path)] == ["1"]


def test_a_file_shorter_than_the_checkpoint_says_is_not_filled_up(writer):
    """Rows that were never on disk (a power loss) cannot come back, and nothing takes their place."""
    writer(step(1))
    whole = writer.offset()
    writer(step(2))
    offset = writer.offset()
    for lost in (3, offset - whole):
        writer.path.write_bytes(writer.path.read_bytes()[: offset - lost])
        writer.truncate(offset)
        assert writer.offset() == whole
    writer(step(2))
    assert [row["step"] for row in rows(writer.path)] == ["1", "2"]
