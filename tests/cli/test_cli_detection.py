"""Detection from the command line, start to end, on coloured rectangles."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_boxes
import torch
from command_line import NETWORKS, snug

import snugfit
from snugfit._cli.finished_runs import summary
from snugfit._storage.manifest import Manifest
from snugfit.detection import detections

MODEL = ["--task", "detect", "--model", "tiny_nets:detector", "--image-size", "32", "--threads", "1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set of 60 images and a run on it, its record in a file."""
    place = tmp_path_factory.mktemp("detection")
    tiny_boxes.write_yolo(place / "set", (("train", 44), ("val", 10), ("test", 6)))
    (place / "set" / "labels" / "train" / "0000.txt").unlink()
    done = snug(
        "train", *MODEL, "--strategy", "backprop", "--data", "set", "--epochs", "20", "--batch-size", "4",
        "--optimizer", "adamw", "--lr", "0.003", "--no-augment", "--memory", "60MB", "--out", "run", "--json",
        cwd=place,
    )  # fmt: skip
    (place / "record.json").write_text(done.stdout)
    (place / "said.txt").write_text(done.stderr)
    return place


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process and the scripts of its tests find the network, as commands do."""
    monkeypatch.syspath_prepend(str(NETWORKS))
    monkeypatch.setenv("PYTHONPATH", str(NETWORKS))


@pytest.fixture
def record(place: Path) -> dict:
    return json.loads((place / "record.json").read_text())


def test_training_finds_more_than_at_the_start(place, record):
    with (place / "run" / "metrics.csv").open(newline="") as file:
        found = [float(row["map50"]) for row in csv.DictReader(file) if row["map50"]]
    assert len(found) == 20
    assert found[-1] > found[0] + 0.2
    assert record["accuracy"]["val"] == pytest.approx(max(found), abs=1e-4), "the best epoch's weights are kept"


def test_memory_stays_within_prediction_and_budget(record):
    assert record["enforced"] is True
    assert 0 < record["measured"]["peak_bytes"] <= record["predicted"]["peak_bytes"] <= 60_000_000


def test_the_record_names_the_task(record):
    assert record["accuracy"]["map50"] == record["accuracy"]["test"] > 0.2
    assert record["accuracy"]["test_top5"] is None and record["confusion"] == []
    workload = record["workload"]
    assert (workload["task"], workload["most_boxes"], len(workload["anchors"])) == ("detect", 2, 3)
    assert all(0.2 < side < 0.8 for anchor in workload["anchors"] for side in anchor), "clusters of the boxes"


def test_progress_and_page_say_map50_and_what_is_odd(place):
    said, page = (place / "said.txt").read_text(), (place / "run" / "report.html").read_text()
    assert "val mAP50" in said and "mAP50 " in said.partition("peak memory")[2]
    assert "accuracy" not in said
    assert "set: 1 images have no file of labels" in said
    assert "Test mAP50" in page and "Validation mAP50 reached" in page


def test_evaluate_gives_the_records_map50(place, record):
    found = json.loads(snug("evaluate", "run", "--json", cwd=place).stdout)
    assert (found["split"], found["count"]) == ("test", 6)
    assert found["map50"] == found["accuracy"] == pytest.approx(record["accuracy"]["test"], abs=1e-9)
    assert set(found["per_class"]) == set(tiny_boxes.NAMES)
    other = snugfit.evaluate(place / "run", data=str(place / "set"), split="val")
    assert other["map50"] == pytest.approx(record["accuracy"]["val"], abs=1e-9)


def test_evaluate_prints_map50():
    lines = summary({"map50": 0.5, "accuracy": 0.5, "count": 3, "per_class": {"red": 0.5, "blue": None}})
    assert lines[0] == "mAP50     50.00 %" and lines[1].split() == ["images", "3"]
    assert lines[2:] == ["  red   50.00 %", "  blue  -"]


def test_predict_prints_boxes_in_pixels(place):
    image = place / "set" / "images" / "train" / "0001.png"
    found = json.loads(snug("predict", "run", str(image), "--json", cwd=place).stdout)["predictions"]
    assert found and set(found[0]) == {"path", "class", "probability", "left", "top", "right", "bottom"}
    assert all(0 <= each["left"] < each["right"] <= 64 and 0 <= each["top"] < each["bottom"] <= 64 for each in found)
    rows = list(csv.reader(snug("predict", "run", str(image), "--top", "1", cwd=place).stdout.splitlines()))
    assert rows[0] == ["path", "class", "probability", "left", "top", "right", "bottom"] and len(rows) == 2
    assert rows[1][1] == found[0]["class"] and float(rows[1][3]) == pytest.approx(found[0]["left"], abs=0.06)


def test_pictures_of_classes_are_left_out_with_a_reason(place):
    missing = json.loads(snug("report", "run", "--pictures", "--json", cwd=place).stdout)["missing"]
    assert any("No Grad-CAM: it explains the class of an image" in line for line in missing)


def test_load_gives_a_plain_module_whose_boxes_the_run_names(place):
    model = snugfit.load(place / "run")
    architecture = snugfit.Architecture.read(place / "run")
    outputs = model(torch.randn(2, 3, 32, 32))
    assert isinstance(model, torch.nn.Module) and outputs.shape == (2, 21, 8, 8)
    assert len(detections(outputs, architecture.anchors, 0.0)) == 2
    assert architecture.class_names == tiny_boxes.NAMES


@pytest.mark.slow
def test_a_resumed_run_ends_like_one_that_was_left_alone(place, tmp_path):
    """A copy of the run, cut back to its start by taking away what it had learned."""
    again = tmp_path / "again"
    again.mkdir()
    for name in ("request.json", "profile.json", "plan.json", "architecture.json"):
        shutil.copy(place / "run" / name, again / name)
    request = json.loads((again / "request.json").read_text())
    plan = json.loads((again / "plan.json").read_text())
    assert Path(request["data"]["data"]) == place / "set", "absolute, to be found from anywhere"
    for part in (request["training"], plan["workload"]):
        part["epochs"] = 2
    (again / "request.json").write_text(json.dumps(request))
    (again / "plan.json").write_text(json.dumps(plan))
    Manifest.of(again)
    whole = tmp_path / "whole"
    shutil.copytree(again, whole)
    snug("train", "--resume", str(whole), cwd=tmp_path)
    stopper = (
        "import sys, snugfit\nfrom snugfit.errors import InterruptedRunError\n"
        "from snugfit._training.events import EpochDone\n"
        "def stop(event):\n    if isinstance(event, EpochDone):\n        stop.epochs += 1\n"
        "        if stop.epochs == 2:\n            raise InterruptedRunError('stopped')\n"
        "stop.epochs = 0\nsnugfit.prepare_process(1)\n"
        "try:\n    snugfit.resume(sys.argv[1], (stop,))\nexcept InterruptedRunError:\n    print('stopped')\n"
    )
    done = subprocess.run([sys.executable, "-c", stopper, str(again)], capture_output=True, text=True, check=True)
    assert done.stdout == "stopped\n" and not (again / "record.json").exists()
    snug("train", "--resume", str(again), cwd=tmp_path)
    one, other = (snugfit.load(run).state_dict() for run in (whole, again))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    assert (whole / "metrics.csv").read_text().count("\n") == (again / "metrics.csv").read_text().count("\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--model", "yolov2_16", "--image-size", "40"], 4, "multiple of 16, not 40"),
        (["--model", "yolov2_16", "--strategy", "blockwise", "--image-size", "32"], 3, "one class for each image"),
    ],
)
def test_what_does_not_go_together_is_one_error(place, arguments, code, said):
    options = ["--task", "detect", "--data", "set", "--epochs", "1", "--out", "never"]
    assert said in snug("train", *options, *arguments, cwd=place, code=code).stderr
    assert not (place / "never").exists()
