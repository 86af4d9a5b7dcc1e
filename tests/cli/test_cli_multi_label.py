"""Several labels per image from the command line, start to end, on coloured squares."""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path

import pytest
import torch
from command_line import snug
from PIL import Image

import snugfit
from snugfit._cli.finished_runs import summary

COLOURS = ("blue", "green", "red")
MODEL = ["--task", "multi-label", "--model", "smallconv", "--image-size", "16", "--threads", "1"]


def write(folder: Path, copies: int) -> None:
    """Images with a label for every colour channel that is bright."""
    rows = ["file,labels"]
    for number, bright in enumerate(list(itertools.product((False, True), repeat=3)) * copies):
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), tuple(40 + number % 20 + 170 * on for on in reversed(bright))).save(
            folder / f"{number}.png"
        )
        rows.append(f"{number}.png," + ";".join(itertools.compress(COLOURS, bright)))
    (folder / "labels.csv").write_text("\n".join(rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and a run on them, its record in a file."""
    place = tmp_path_factory.mktemp("labels")
    for part, copies in (("train", 12), ("val", 2), ("test", 2)):
        write(place / "set" / part, copies)
    done = snug(
        "train", *MODEL, "--data", "set", "--epochs", "6", "--batch-size", "8", "--strategy", "backprop",
        "--lr", "0.05", "--no-augment", "--memory", "120MB", "--out", "run", "--json", cwd=place,
    )  # fmt: skip
    (place / "record.json").write_text(done.stdout)
    return place


def test_the_record_has_mean_average_precision(place: Path) -> None:
    record = json.loads((place / "record.json").read_text())
    accuracy = record["accuracy"]
    assert accuracy["map"] == accuracy["test"] > 0.9 and accuracy["test_top5"] is None
    assert record["measured"]["peak_bytes"] <= record["predicted"]["peak_bytes"] <= record["budget"]["memory_bytes"]
    workload = json.loads((place / "run" / "record.json").read_text())["workload"]
    assert (workload["task"], workload["classes"]) == ("multi-label", 3)
    assert "mAP" in (place / "run" / "report.html").read_text()


def test_it_is_evaluated_on_its_own_data_and_on_others(place: Path) -> None:
    found = json.loads(snug("evaluate", "run", "--json", cwd=place).stdout)
    assert found["split"] == "test" and found["map"] == found["accuracy"] and set(found["per_class"]) == set(COLOURS)
    assert found["map"] == pytest.approx(json.loads((place / "record.json").read_text())["accuracy"]["test"])
    assert "confusion" not in found
    write(place / "others", 3)
    other = snugfit.evaluate(place / "run", data=str(place / "others"))
    assert (other["split"], other["count"]) == ("all", 24)
    assert summary(other)[0].startswith("mAP ") and summary(other)[1] == "images    24"


def test_predictions_are_the_labels_that_are_likelier_than_not(place: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(snug("predict", "run", "set/test", cwd=place).stdout)))
    model = snugfit.load(place / "run")
    means, deviations = ((torch.tensor(each).view(3, 1, 1)) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for number in range(8):
        colour = Image.open(place / "set" / "test" / f"{number}.png").getpixel((0, 0))
        image = torch.tensor(colour).view(3, 1, 1).expand(3, 16, 16) / 255
        with torch.no_grad():
            chances = model(((image - means) / deviations)[None])[0].sigmoid().tolist()
        mine = {row["class"]: float(row["probability"]) for row in rows if row["path"].endswith(f"/{number}.png")}
        expected = {name: chance for name, chance in zip(COLOURS, chances, strict=True) if chance >= 0.5}
        assert mine == pytest.approx(expected, abs=1e-4) and list(mine) == sorted(mine, key=mine.get, reverse=True)
    assert len(list(snugfit.predict(place / "run", place / "set" / "test" / "0.png", top=2))) == 2


def test_it_is_exported_with_its_task(place: Path) -> None:
    onnx = pytest.importorskip("onnx")
    snug("export", "run", "--out", "deploy", cwd=place)
    metadata = {each.key: json.loads(each.value) for each in onnx.load(place / "deploy" / "model.onnx").metadata_props}
    assert metadata["task"] == "multi-label" and metadata["class_names"] == list(COLOURS)


def test_pictures_of_one_class_are_left_out_with_a_reason(place: Path) -> None:
    done = snug("report", "run", "--pictures", cwd=place)
    assert "No Grad-CAM: it explains the class of an image, and this model gives several labels" in done.stderr


def test_other_data_and_profiles_are_refused(place: Path) -> None:
    done = snug("plan", *MODEL, "--data", "nowhere", cwd=place, code=4)
    assert "'nowhere' does not exist. --task multi-label takes a folder of images with a labels.csv" in done.stderr
    done = snug("plan", *MODEL, "--data", "set", "--label-smoothing", "0.1", cwd=place, code=2)
    assert "--label-smoothing 0.1 spreads one class over all" in done.stderr


def test_a_plan_needs_no_data(place: Path) -> None:
    arguments = ["--task", "multi-label", "--model", "smallconv", "--input-shape", "3x16x16", "--classes", "5"]
    found = json.loads(snug("plan", *arguments, "--strategy", "backprop", "--json", cwd=place).stdout)
    assert found["workload"]["task"] == "multi-label" and found["candidates"][0]["feasible"]
