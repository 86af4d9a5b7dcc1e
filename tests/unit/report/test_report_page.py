"""The run's HTML page: whole, self-contained, escaped, and honest about what is missing."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fake_runs
import pytest
from html_page import Page

from snugfit._core.record import ExitRecord, Record
from snugfit._report.canvas import PALETTE
from snugfit._report.memory import draw_memory_lines
from snugfit._report.page import write_report
from snugfit._report.run_page import render, verdict
from snugfit._storage.manifest import Manifest
from snugfit.errors import CheckpointError, OutOfStorageError


def page_of(run_dir: Path, record: Record, rows) -> tuple[str, Page]:
    path = write_report(fake_runs.write_run(run_dir, record, rows))
    assert path == run_dir / "report.html"
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == []
    return html, page


@pytest.fixture(scope="module")
def blockwise(tmp_path_factory):
    record = fake_runs.blockwise(Path("runs/0001"))
    return page_of(tmp_path_factory.mktemp("blockwise"), record, fake_runs.metrics(record))


@pytest.fixture(scope="module")
def backprop(tmp_path_factory):
    record = fake_runs.backprop(Path("runs/0002"))
    return page_of(tmp_path_factory.mktemp("backprop"), record, None)


def test_blockwise_page_has_every_figure(blockwise):
    _, page = blockwise
    assert page.labels == [
        "Peak memory per phase against the budget",
        "Memory in use over time",
        "Memory of every unit over batch size",
        "Largest batch per unit and batch size per block",
        "Validation accuracy of the exit after every unit",
        "Validation accuracy against parameters",
        "Training loss over time",
        "Training and validation accuracy over time",
        "Confusion matrix",
        "Activation cache written per block",
    ]


def test_page_is_self_contained(blockwise, backprop):
    for html, page in (blockwise, backprop):
        assert "http" not in html
        assert not {"script", "link", "iframe"} & set(page.tags)
        assert not re.search(r"url\((?!#)|@import", html)
        assert all(source.startswith("data:image/png") for source in re.findall(r'href="([^#][^"]*)"', html))


def test_summary_says_what_was_predicted_and_measured(blockwise):
    text = blockwise[1].text
    for words in (
        "Within budget", "92.7 MB", "predicted 98.6 MB", "budget 100.0 MB", "(enforced)", "17m23s", "predicted 17m01s",
        "983.0 MB", "89.9 %", "validation 90.5 %", "top-5 99.5 %", "567k", "26.0 times smaller", "exit 5 of 13",
    ):  # fmt: skip
        assert words in text, words


def test_titles_say_the_findings(blockwise):
    text = blockwise[1].text
    for words in (
        "Every phase stayed within the budget of 100.0 MB", "unit 2 grows fastest",
        "Blocks train with batches from 59 to 171", "Unit 5 of 13 is the exit: 90.5 %",
        "no other exit gains more than 0.1 points", "cat is mistaken for dog most often: 11",
        "The largest activation cache is 655.0 MB, after block 1/4",
    ):  # fmt: skip
        assert words in text, words


def test_a_phase_above_its_own_prediction_is_named_although_the_run_held(tmp_path):
    record = fake_runs.blockwise(tmp_path)
    first, *others = record.phases
    missed = dataclasses.replace(first, predicted_peak_bytes=first.measured_peak_bytes - 1)
    assert "Above their own prediction" not in page_of(tmp_path, record, None)[1].text
    text = page_of(tmp_path, dataclasses.replace(record, phases=(missed, *others)), None)[1].text
    assert "Above their own prediction: Block 1" in text or "Above their own prediction: block 1" in text


def test_names_from_outside_are_escaped(blockwise):
    html, page = blockwise
    assert "<b>&" not in html
    assert "&lt;b&gt;&amp;" in html
    assert "<b>&" in page.text


def test_dollars_are_no_formulas(tmp_path):
    record = dataclasses.replace(fake_runs.blockwise(tmp_path), class_names=("$x$", "$\\bad{", *fake_runs.NAMES[2:]))
    assert "$\\bad{" in page_of(tmp_path, record, None)[1].text


def test_colours_follow_the_theme(blockwise):
    html = blockwise[0]
    style, body = html.split("</style>")
    for name in PALETTE:
        assert len(re.findall(rf"--{name}:", style)) == 2, f"--{name} needs a light and a dark value"
        assert PALETTE[name] not in body
    assert "prefers-color-scheme: dark" in style


def test_what_is_missing_is_said(backprop):
    _, page = backprop
    assert page.labels == ["Peak memory per phase against the budget"]
    assert "Exits" not in page.text
    assert "no metrics.csv" in page.text
    assert "no confusion matrix" in page.text
    assert "network exceeded the budget by 1.3 MB" in page.text
    assert "Over budget: memory by 1.3 MB" in page.text


def test_settings_are_shown_without_nested_lists():
    record = fake_runs.blockwise(Path("runs/0001"))
    settings = {"test_batch": 16, "shown_sides": [2, 3], "layer_costs": [["aan", [[9437184, 70656]]]]}
    page = render(dataclasses.replace(record, settings=settings), [])
    assert all(text in page for text in ("test batch", "shown sides", "2, 3"))
    assert "layer costs" not in page and "9437184" not in page


def test_bare_record_still_gives_a_page():
    empty = {name: {} for name in ("budget", "predicted", "measured", "accuracy", "parameters", "settings")}
    record = Record("backprop", "m", "d", "cpu", enforced=False, exit=None, run_dir="r", **empty)
    page = Page(render(record, []))
    assert "No budget was set" in page.text
    assert page.labels == []


@pytest.mark.parametrize("classes", [2, 20, 100])
def test_confusion_labels_stop_at_twenty_classes(tmp_path, classes):
    names = tuple(f"name{i:03}" for i in range(classes))
    matrix = [[int(row == column) for column in range(classes)] for row in range(classes)]
    record = dataclasses.replace(fake_runs.backprop(tmp_path), confusion=matrix, class_names=names)
    text = page_of(tmp_path, record, None)[1].text
    assert ("name001" in text) == (classes <= 20)
    assert "No image was put into a wrong class" in text


def test_many_blocks_and_units(tmp_path):
    phase = fake_runs.blockwise(tmp_path).phases[0]
    phases = tuple(dataclasses.replace(phase, name=f"block {i + 1}/9 u{i}", units=(f"u{i}",)) for i in range(9))
    exits = tuple(ExitRecord(f"u{i}", i, 0.5, 1000) for i in range(53))
    record = dataclasses.replace(fake_runs.blockwise(tmp_path), phases=phases, exits=exits, exit=None)
    _, page = page_of(tmp_path, record, fake_runs.metrics(record, epochs=1, steps=3))
    assert len(page.labels) == 10


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("available", "shown"), [(10**9, False), (40 * 10**6, True), (None, False)])
def test_a_budget_far_above_the_lines_is_not_drawn(available, shown):
    """Its label would stand outside the axes, and leave them no room."""
    lines = {f"unit{index}": fake_runs.line(index) for index in range(3)}
    assert (">budget<" in draw_memory_lines(lines, {}, available, 64)) is shown


def test_verdict():
    record = fake_runs.blockwise(Path("r"))
    assert verdict(record)[0] == "good"
    storage = dataclasses.replace(record, budget={"memory_bytes": None, "storage_bytes": 900_000_000})
    assert verdict(storage) == ("bad", "Over budget: storage by 83.0 MB")
    unmeasured = dataclasses.replace(record, measured={})
    assert verdict(unmeasured)[0] == "plain"
    assert verdict(dataclasses.replace(record, budget={})) == ("plain", "No budget was set")


def test_missing_record_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="it is empty, so no run has begun"):
        write_report(tmp_path)
    Manifest.of(tmp_path)
    with pytest.raises(CheckpointError, match=r"no record\.json"):
        write_report(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"strategy": "backprop"}', "\xff"])
def test_damaged_record_is_an_error(tmp_path, content):
    (tmp_path / "record.json").write_bytes(content.encode("latin-1"))
    Manifest.of(tmp_path)
    with pytest.raises(CheckpointError, match="damaged"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_drawing_leaves_matplotlib_and_torch_alone(tmp_path):
    record = fake_runs.blockwise(tmp_path)
    fake_runs.write_run(tmp_path, record, None)
    code = (
        "import sys, pathlib\n"
        "import snugfit._report.page, snugfit._report.console, snugfit._report.tables\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        "snugfit._report.page.write_report(pathlib.Path(sys.argv[1]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env={**os.environ})
    code = "import sys, snugfit._api\nassert not {'matplotlib', 'jinja2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # they count towards the memory at rest
    assert json.loads((tmp_path / "record.json").read_text())["schema"] == 1


def test_a_page_that_the_disk_does_not_hold_leaves_no_draft(tmp_path, monkeypatch):
    record = fake_runs.blockwise(Path("runs/0001"))
    run = fake_runs.write_run(tmp_path, record, fake_runs.metrics(record))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfStorageError, match=r"no space left on the device while writing .*report\.html"):
        write_report(run)
    assert not list(run.glob("report.html*"))
