"""The page's section on the selection of tensors, from one tensor layer to hundreds, and its words and rows."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import fake_runs
import fake_selections as fake
import pytest
from html_page import Page

from snugfit._core.record import Record
from snugfit._report.canvas import PALETTE
from snugfit._report.intervals import StepTime, epoch_words, phase_of, step_time, tensors_of
from snugfit._report.run_page import render, verdict
from snugfit._report.selection import body, flops, selections, step_times

LABELS = ["Tensors that train, by interval", "Operations per epoch", "Time of a training step by interval"]


def titles(svg: str) -> list[str]:
    """Tooltips, in order, each once."""
    return list(dict.fromkeys(re.findall(r"<title>(.*?)</title>", svg)))


def rows(html: str) -> list[list[str]]:
    """Cells of the table's body."""
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)[1:]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("count", "intervals"), [(3, 1), (5, 2), (161, 4), (220, 34)])
def test_every_size_of_network_has_its_figures(count, intervals):
    record = fake.elastic(Path("r"), count, intervals)
    html = body(record)
    page = Page(html)
    assert page.open == [] and page.labels == LABELS
    assert len(rows(html)) == intervals
    assert not [name for name, colour in PALETTE.items() if colour in html], "colours must follow the theme"


def test_the_map_names_every_tensor_and_fills_the_cells_that_train():
    record = fake.elastic(Path("r"), 20, 2)
    every = record.tensors
    first, second = (dataclasses.replace(each, tensors=()) for each in record.intervals)
    first = dataclasses.replace(first, tensors=(every[4], *every[-2:]))
    second = dataclasses.replace(second, tensors=(every[4], every[7], *every[-2:]))
    svg = selections((first, second), tensors_of(record))
    tips = titles(svg)
    assert len(tips) == 20
    assert tips[0] == "1, layers.0.conv.weight, 100 parameters: trains in 0 of 2 intervals"
    assert tips[4].startswith("5, ") and tips[4].endswith("500 parameters: trains in 2 of 2 intervals")
    assert tips[7].endswith("trains in 1 of 2 intervals")
    assert tips[19] == "20, fc.bias, classifier, 50 parameters: trains in 2 of 2 intervals"
    for text in ("3 tensors, 600 parameters", "4 tensors, 1.4k parameters", "1\N{EN DASH}3", "4\N{EN DASH}6"):
        assert f">{text}<" in svg, text
    filled = {colour: svg.count(f"fill: var(--{colour})") for colour in ("measured", "chosen")}
    legend = {"measured": 1, "chosen": 1}
    assert {name: filled[name] - legend[name] for name in filled} == {"measured": 2, "chosen": 2}


def test_operations_are_two_per_multiply_accumulate_and_image():
    record = fake.elastic(Path("r"), 20, 2, epochs=2)
    svg = flops(record.intervals, 1000)
    assert titles(svg) == [
        "interval 1, epochs 1\N{EN DASH}2: 0.92 TFLOPs, 0.51 of full training",
        "interval 2, epochs 3\N{EN DASH}4: 0.94 TFLOPs, 0.52 of full training",
    ]
    assert svg.count("<title>") == 4, "a bar for every epoch"
    assert ">full training<" in svg and "(TFLOPs)" in svg
    assert "(GFLOPs)" in flops(record.intervals, 10)


def test_step_times_stand_against_the_full_step_and_rho():
    record = fake.elastic(Path("r"), 20, 1)
    unmeasured = dataclasses.replace(record.intervals[0], predicted_seconds=0.311, measured_seconds=0.0)
    svg = step_times((unmeasured,), 0.5)
    assert titles(svg) == ["interval 1: predicted 311ms, measured none"]
    assert ">full step<" in svg and ">rho 0.5<" in svg
    assert ">rho" not in step_times((unmeasured,), None)


def test_rows_put_predictions_beside_measurements_of_the_same_interval():
    record = fake.elastic(Path("r"), 20, 3)
    interval = dataclasses.replace(record.intervals[2], predicted_seconds=0.311, measured_seconds=0.280)
    record = dataclasses.replace(record, intervals=(*record.intervals[:2], interval), phases=record.phases[1:])
    found = rows(body(record))
    assert found[2] == [
        "3", "7\N{EN DASH}9", str(len(interval.tensors)), found[2][3], "0.50", "0.45", "311ms",
        "280ms", "271.0 MB", "245.0 MB", "1.8s", "yes",
    ]  # fmt: skip
    assert found[0][9] == "\N{EN DASH}", "its phase is missing"
    assert found[1][11] == "no"


def test_words_say_what_was_found():
    record = fake.elastic(Path("r"), 20, 2)
    head = record.tensors[-2:]
    one = dataclasses.replace(record.intervals[0], tensors=head, predicted_seconds=0.31, measured_seconds=0.36)
    two = dataclasses.replace(one, tensors=(record.tensors[3], *head), first_epoch=3)
    text = Page(body(dataclasses.replace(record, intervals=(one, two)))).text
    for words in (
        "2 to 3 of 20 tensors train at a time", "1 tensors came or went", "At most 500 of 17.2k parameters (2.9 %)",
        "An epoch takes 51.1 % of the operations", "for 2,880 images in each of 6 epochs",
        "A step took 0.58 of a full one, predicted 0.50: over rho 0.5",
    ):  # fmt: skip
        assert words in text, words
    same = Page(body(dataclasses.replace(record, intervals=(one, dataclasses.replace(one, first_epoch=3))))).text
    assert "it stayed the same throughout" in same


def test_a_scheme_that_keeps_its_selection_is_one_row():
    record = fake.elastic(Path("r"), 20, 1, epochs=6)
    whole = dataclasses.replace(record.intervals[0], tensors=record.tensors)
    record = dataclasses.replace(record, intervals=(whole,), settings={"scheme": "full"}, budget={})
    text = Page(body(record)).text
    assert "All 20 tensors train" in text and "The scheme full makes one selection" in text
    assert "rho 0.5" not in text


def test_records_without_intervals_draw_nothing():
    assert body(fake_runs.blockwise(Path("r"))) == ""
    record = fake.elastic(Path("r"), 5, 1)
    begun = dataclasses.replace(record.intervals[0], epochs=0)
    assert body(dataclasses.replace(record, intervals=(begun,))) == ""
    assert "Selection of tensors" not in Page(render(fake_runs.backprop(Path("r")), [])).text


def test_a_bare_record_of_intervals_still_draws():
    """As an interrupted writer, or another version, might leave it."""
    record = fake.elastic(Path("r"), 5, 2)
    bare = dataclasses.replace(record, profile={}, tensors=(), workload={}, phases=(), settings={})
    html = body(bare)
    assert Page(html).labels == [LABELS[0], LABELS[2]]
    found = tensors_of(bare)
    assert found.classifier == {"fc.weight", "fc.bias"} and found.counted(found.names) is None
    assert rows(html)[0][3] == "\N{EN DASH}"


@pytest.fixture
def page() -> Page:
    record = fake.elastic(Path("r"), 20, 2)
    return Page(render(record, [row for row in map(_row, fake_runs.metrics(_with_units(record), 1, 2)) if row]))


def _with_units(record: Record) -> Record:
    return dataclasses.replace(record, phases=tuple(dataclasses.replace(p, units=("u",)) for p in record.phases))


def _row(cells):
    from snugfit._report.metrics import MetricRow

    return MetricRow(cells["phase"], {k: float(v) for k, v in cells.items() if k != "phase" and v != ""})


def test_the_page_tells_rho_where_it_tells_the_budget(page):
    assert "rho 0.5 of a full step's time" in page.text
    assert re.search(r"Step time over full step 0\.4\d predicted 0\.50 · rho 0\.5 · \d+ms instead of 622ms", page.text)
    assert [label for label in page.labels if label in LABELS] == LABELS


def test_phases_are_called_intervals_and_share_one_loss(page):
    assert "interval 2" in page.text and "block 2" not in page.text
    assert "Every block has a loss" not in page.text and "of the block's last exit" not in page.text


def test_the_verdict_counts_rho():
    record = fake.elastic(Path("r"), 20, 1)
    assert verdict(record) == ("good", "Within budget")
    alone = dataclasses.replace(record, budget={"time_ratio": 0.5})
    assert verdict(alone) == ("good", "Within budget")
    slow = dataclasses.replace(record.intervals[0], measured_seconds=0.4)
    kind, words = verdict(dataclasses.replace(alone, intervals=(slow,)))
    assert (kind, words) == ("bad", "Over budget: step time, 0.64 of a full one instead of 0.5")


def test_step_times_are_means_over_epochs():
    one, two = fake.elastic(Path("r"), 5, 2).intervals
    one = dataclasses.replace(one, epochs=1, predicted_seconds=0.3, measured_seconds=0.2, full_seconds=1.0)
    two = dataclasses.replace(two, epochs=3, predicted_seconds=0.3, measured_seconds=0.4, full_seconds=2.0)
    found = step_time((one, two))
    assert (found.predicted, found.measured, found.full) == pytest.approx((0.3, 0.35, 1.75))
    assert step_time((dataclasses.replace(one, full_seconds=0.0),)) is None


def test_rho_is_held_to_the_digits_that_are_shown():
    assert not StepTime(0.3, 0.3334, 1.0).over(0.333)
    assert StepTime(0.3, 0.346, 1.0).over(0.333)
    assert not StepTime(0.3, None, 1.0).over(0.1)


def test_epochs_and_phases_of_an_interval():
    record = fake.elastic(Path("r"), 5, 2, epochs=1)
    assert [epoch_words(each) for each in record.intervals] == ["1", "2"]
    assert phase_of(record, 1) is record.phases[1] and phase_of(record, 2) is None
