"""What each command prints, where, and with which exit code."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from snugfit._cli import worker
from snugfit._core.plan import Plan
from snugfit._core.request import Request
from snugfit._report import tables
from snugfit._report.tables import print_plan
from snugfit._training.events import Notice, StepDone


@pytest.fixture(autouse=True)
def drawings(monkeypatch):
    """Note what the report package is asked to draw."""
    drawn: list[str] = []
    page = types.ModuleType("snugfit._report.page")

    def write_report(run_dir: Path) -> Path:
        drawn.append(f"page {run_dir}")
        return run_dir / "report.html"

    def print_table(plan: Plan) -> None:
        drawn.append("table")
        print_plan(plan)

    vars(page)["write_report"] = write_report
    monkeypatch.setitem(sys.modules, "snugfit._report.page", page)
    monkeypatch.setattr(tables, "print_plan", print_table)
    return drawn


def test_train_prints_the_run_folder_and_draws_the_page(snugfit, drawings):
    outcome = snugfit("train", "--out", "here")
    assert (outcome.code, outcome.out) == (0, "here\n")
    assert drawings == ["page here"]
    assert "here/report.html" in outcome.err and "event RunStarted" in outcome.err


def test_no_report_is_drawn_if_none_is_wanted(snugfit, drawings):
    outcome = snugfit("train", "--out", "here", "--no-report")
    assert (outcome.code, outcome.out, drawings) == (0, "here\n", []) and "report" not in outcome.err


def test_train_json_is_the_record_alone_whatever_libraries_print(snugfit):
    outcome = snugfit("train", "--model", "noisy", "--json", "--threads", "3", "--quiet")
    assert outcome.code == 0
    assert outcome.json["schema"] == 1 and outcome.json["accuracy"] == {"val": 0.9, "test": None}
    assert outcome.json["settings"]["threads"] == [3]
    assert Request.from_json(outcome.json["settings"]["request"]).model.model == "noisy"
    assert "a library prints" in outcome.err and "native code" in outcome.err
    assert "event" not in outcome.err


def test_resume_keeps_the_threads_of_the_run(snugfit, tmp_path):
    (tmp_path / "request.json").write_text(json.dumps({"machine": {"threads": 5}}))
    assert snugfit("train", "--resume", str(tmp_path), "--json").json["settings"] == {"resumed": True, "threads": [5]}
    assert snugfit("train", "--resume", "no/where", "--json").json["settings"]["threads"] == [None]


def test_a_page_that_cannot_be_drawn_does_not_spoil_the_run(snugfit, monkeypatch):
    def fail(run_dir: Path) -> Path:
        raise ValueError("no ink")

    monkeypatch.setattr(sys.modules["snugfit._report.page"], "write_report", fail)
    outcome = snugfit("train", "--out", "here", "--json")
    assert outcome.code == 0 and outcome.json["run_dir"] == "here"
    assert "no ink" in outcome.err and "snugfit report here" in outcome.err


def test_plan_prints_a_table_and_json_on_request(snugfit, drawings):
    plain = snugfit("plan", "--memory", "100MB")
    assert (plain.code, plain.out) == (0, "")
    assert drawings == ["table"] and "time per" in plain.err
    data = snugfit("plan", "--memory", "100MB", "--json").json
    assert set(data) >= {"workload", "budget", "hardware", "candidates", "chosen"}
    assert data["budget"]["memory"] == 10**8 and data["chosen"] == 0


def test_an_infeasible_plan_is_shown_and_exits_3(snugfit, drawings):
    outcome = snugfit("plan", "--model", "too-big", "--memory", "100B", "--json")
    assert outcome.code == 3 and drawings == ["table"]
    assert outcome.json["chosen"] is None and outcome.json["candidates"][0]["smallest_bytes"] == 200
    assert outcome.json["error"]["type"] == "InfeasibleBudgetError"
    assert "Smallest budget that would do: 200 B" in outcome.err


def test_trials_stand_beside_predictions(snugfit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    outcome = snugfit("plan", "--compare", "--compare-steps", "3", "--json")
    first, second = outcome.json["comparison"]
    assert (first["images"], first["seconds_ratio"], first["measured_peak_bytes"]) == (24, 2.0, 80)
    assert second["measured_seconds"] is None and "no [room]." in outcome.err
    assert "comparison" not in snugfit("plan", "--json").json


def test_there_are_no_trials_where_nothing_fits(snugfit):
    outcome = snugfit("plan", "--model", "too-big", "--memory", "100B", "--compare", "--json")
    assert outcome.code == 3 and "comparison" not in outcome.json and "Trials" not in outcome.err


def test_profile(snugfit):
    outcome = snugfit("profile", "--model", "vgg16", "--json")
    assert outcome.json["units"][0]["macs"] == 5678
    assert all(word in outcome.err for word in ("unit0", "1,234", "4.1 kB", "500ms"))
    assert "learning_signal" not in outcome.json and "learning signal" not in outcome.err
    assert snugfit("profile").out == ""


def test_profile_with_the_learning_signal(snugfit, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    outcome = snugfit("profile", "--learning-signal", "--batch-size", "64", "--json")
    assert outcome.json["learning_signal"] == {
        "backprop": {"macs": 4_000_000, "additional_parameters": 0, "peak_bytes": 2_500_000},
        "lls-m": {"macs": 30_000, "additional_parameters": 1400, "peak_bytes": 700_000},
    }
    assert outcome.json["units"][0]["name"] == "unit0" and "unit0" in outcome.err
    table = outcome.err.partition("learning signal")[2]
    assert all(text in table for text in ("at batch 64", "one unit at a time", "additional parameters"))
    row = next(line for line in table.splitlines() if "lls-m" in line)
    assert all(text in row for text in ("30,000", "0.75%", "1,400", "700.0 kB"))
    (tmp_path / "o.yaml").write_text("learning_signal: true\n")
    assert "learning_signal" in snugfit("profile", "--config", "o.yaml", "--json").json
    assert snugfit("plan", "--learning-signal").code == 2


def test_profile_with_the_tensors(snugfit, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    outcome = snugfit("profile", "--tensors", "--json")
    row, timing = outcome.json["tensors"][0], outcome.json["tensor_timing"]
    assert (row["name"], row["t_dw"], row["t_dy"]) == ("conv.weight", 0.0125, 0.0000314)
    assert (timing["batch"], timing["forward_seconds"], timing["steps"]["stock"]) == (16, 0.0451, 1.25)
    table = outcome.err.partition("tensors in order of execution")[2]
    assert ", batch of 16 " in table and "forward pass 45.1ms, full step of 8 1.2s" in table
    assert "t_dy: passing the gradient on" in table
    line = next(line for line in table.splitlines() if "conv.weight" in line)
    assert all(text in line for text in ("4,608", "12.5ms", "31us", "65.5 kB"))
    assert "full step" not in snugfit("profile", "--tensors", "--memory", "50MB").err
    (tmp_path / "o.yaml").write_text("tensors: true\n")
    assert "tensors" in snugfit("profile", "--config", "o.yaml", "--json").json
    plain = snugfit("profile", "--json")
    assert "tensors" not in plain.json and "order of execution" not in plain.err
    assert snugfit("plan", "--tensors").code == 2


def test_profile_with_the_activation_memory(snugfit, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    page = tmp_path / "charts" / "page.html"
    outcome = snugfit("profile", "--activation-memory", "--chart", str(page), "--json")
    memory = outcome.json["activation_memory"]
    assert (memory["peak_bytes"], memory["peak_block"], memory["trained"]) == (5_720_064, 0, "sidenet")
    table = outcome.err.partition("activation memory")[2]
    row = next(line for line in table.splitlines() if "0 stem" in line)
    assert row.count("5.7 MB") == 2 and row.count("*") == 1
    assert all(text in table for text in ("sidenet trained", "step of 8", "50.6 MB", "95.5 MB", str(page)))
    assert page.read_text().count("<svg") == 1
    (tmp_path / "o.yaml").write_text("activation_memory: true\ntrained: bias+head\n")
    other = snugfit("profile", "--config", "o.yaml", "--json")
    assert other.json["activation_memory"]["trained"] == "bias+head"
    assert "side modules ahead" not in other.err and "too much" in other.err
    assert "activation_memory" not in snugfit("profile", "--json").json
    assert snugfit("plan", "--activation-memory").code == 2
    assert snugfit("profile", "--activation-memory", "--trained", "most").code == 2


def test_options_of_the_activation_memory_need_it(snugfit):
    for flags in (("--trained", "head"), ("--chart", "page.html")):
        outcome = snugfit("profile", *flags)
        assert outcome.code == 2 and "need --activation-memory" in outcome.err


def test_a_chart_that_cannot_be_written(snugfit, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = snugfit("profile", "--activation-memory", "--chart", str(tmp_path / "file" / "page.html"))
    assert outcome.code == 2 and "Choose another --chart" in outcome.err


def test_evaluate(snugfit):
    plain = snugfit("evaluate", "run", "--data", "folder:x", "--split", "val")
    assert plain.code == 0 and "75.00 %" in plain.out and "cat" in plain.out
    data = snugfit("evaluate", "run", "--data", "folder:x", "--split", "val", "--json").json
    assert data["asked"] == ["folder:x", None, "val"] and data["per_class"] == {"cat": 1.0, "dog": None}


def test_predict_writes_csv_to_stdout_or_a_file(snugfit, tmp_path):
    expected = [["path", "class", "probability"]] + [[f"dir/{i}, of.png", "cat", "0.500000"] for i in range(2)]
    assert list(csv.reader(io.StringIO(snugfit("predict", "run", "dir").out))) == expected
    outcome = snugfit("predict", "run", "dir", "--out", "classes.csv")
    assert outcome.out == "classes.csv\n"
    assert list(csv.reader(io.StringIO((tmp_path / "classes.csv").read_text()))) == expected
    assert len(snugfit("predict", "run", "dir", "--json").json["predictions"]) == 2


def test_predict_prints_nothing_when_it_fails_at_once(snugfit):
    outcome = snugfit("predict", "run", "empty")
    assert (outcome.code, outcome.out) == (4, "")


def test_predict_keeps_the_rows_of_readable_images(snugfit, tmp_path):
    outcome = snugfit("predict", "run", "broken", "--out", "classes.csv")
    assert outcome.code == 4 and "cannot be decoded" in outcome.err
    assert [file.name for file in tmp_path.iterdir()] == ["classes.csv"]
    assert len((tmp_path / "classes.csv").read_text().splitlines()) == 2, "head and the image before the broken one"
    assert snugfit("predict", "run", "empty", "--out", "none.csv").code == 4 and not (tmp_path / "none.csv").exists()
    assert snugfit("predict", "run", "dir", "--out", "no/such/folder.csv").code == 2


def test_report_and_export(snugfit):
    assert snugfit("report", "here").out == "here/report.html\n"
    assert snugfit("report", "here", "--json").json == {"schema": 1, "report": "here/report.html"}
    outcome = snugfit("export", "here", "--format", "onnx", "--out", "there")
    assert outcome.out == "there/model.onnx\n" and "1e-06" in outcome.err
    assert snugfit("export", "here", "--no-check", "--json").json["onnx_max_difference"] is None
    outcome = snugfit("export", "here", "--int8")
    assert "in 8 bits: 50.00 % of 9 test images, 62.50 % before; 2.0 MB" in outcome.err
    refused = snugfit("export", "here", "--format", "safetensors", "--free-size")
    assert (refused.code, refused.out) == (2, "") and "--free-size is for ONNX" in refused.err


def test_pictures_are_drawn_by_the_child_and_missing_ones_are_said(snugfit, drawings):
    outcome = snugfit("report", "here", "--pictures")
    assert (outcome.out, outcome.err.splitlines()[-1]) == ("here/report.html\n", "No t-SNE of M: none.")
    assert snugfit("report", "here", "--pictures", "--data", "digits", "--json").json["missing"] == []
    assert drawings == []
    for flag in ("--data", "--data-dir", "--threads"):
        refused = snugfit("report", "here", flag, "1")
        assert refused.code == 2 and "add --pictures" in refused.err


def test_a_reader_that_leaves_early_is_no_error(start):
    process = start("predict", "run", "many")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "path,class,probability\n"
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""


MISTAKES = [
    "--epochs -1",
    "--epoch 3",
    "--weights nowhere.pth",
    "--weights .",
    "--memory 60XB",
    "--lr abc",
    "--optimizer sdg",
    "--strategy nosuch",
    "--model resnet21",
    "--data digit",
    "--device tpu",
    "--strategy blockwise --local-loss nosuch",
    "--strategy blockwise --patience 3",
    "--ema 0.99 --optimizer schedulefree",
    "--strategy elastic --optimizer schedulefree",
    "--strategy sidenet --optimizer schedulefree",
    "--strategy tiled --optimizer schedulefree",
    "--time-ratio 0.5 --optimizer schedulefree",
    "--focal-gamma 3",
    "--schedule python",
    "--optimizer python",
    "--cutmix 1 --class-weights balanced",
    "--strategy tiled --mixup 0.2",
    "--ema 0.99 --weight-dtype bfloat16",
    "--strategy sidenet --scheme prunetrain",
    "--strategy backprop --local-loss lls",
    "--strategy checkpoint --batch-norm exact",
    "--strategy backprop --time-ratio 0.5",
    "--time-ratio 0.5 --scheme head",
    "--config damaged.yaml",
    "--config unknown.yaml",
    "--config missing.yaml",
]


@pytest.mark.parametrize("command", ["plan", "train"])
def test_mistakes_are_found_before_torch_is_imported(command, tmp_path):
    """None starts a child process, which would import torch; one process checks them all."""
    (tmp_path / "damaged.yaml").write_text("epochs: [1\n")
    (tmp_path / "unknown.yaml").write_text("epoch: 3\n")
    code = (
        "import sys\nfrom snugfit._cli import worker_processes\nfrom snugfit._cli.app import run\n"
        "worker_processes.subprocess.Popen = None\n"
        "for line in sys.argv[2:]:\n    code = 4 if line.startswith('--weights') else 2\n"
        "    assert run([sys.argv[1], *line.split()]) == code, line\n"
        "sys.exit('torch' in sys.modules)"
    )
    asked = [sys.executable, "-c", code, command, *MISTAKES]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == len(MISTAKES)


def test_help_and_usage_errors_import_no_torch():
    code = (
        "import sys\nfrom snugfit._cli.app import run\nrun(sys.argv[1:])\n"
        "import snugfit._report.page\nsys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    for tokens in (
        ["--help"],
        ["--help-all"],
        ["train", "--help"],
        ["train", "--help-all"],
        ["report", "--help"],
        ["export", "--help-all"],
        ["report", "nowhere"],
    ):
        assert subprocess.run([sys.executable, "-c", code, *tokens], capture_output=True, check=False).returncode == 0


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "snugfit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("snugfit ")


def test_a_quiet_run_shows_notices_alone(capsys):
    with worker._progress(quiet=True) as show:
        show(Notice("the batch is [16]"))
        show(StepDone("network", 0, 1, 2, loss=0.5, accuracy=None, lr=0.1, seconds=1.0, current_bytes=1, peak_bytes=2))
    assert capsys.readouterr().err == "note  the batch is [16]\n"


@pytest.mark.parametrize(("noted", "shown"), [(False, 2), (True, 1)])
def test_what_a_first_process_noted_while_planning_is_not_shown_again(noted, shown):
    events, step = [], StepDone("network", 0, 1, 2, 0.5, None, 0.1, 1.0, 1, 2)
    for subscriber in worker._planning({"noted": noted}, (events.append,)):
        subscriber(Notice("trained as a whole"))
        subscriber(step)
    assert len(events) == shown and events[-1] is step
