"""ultralytics in a memory budget."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("ultralytics", exc_type=ImportError)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")

CHECKPOINT = """
import resource
import snugfit.integrations.ultralytics
from snugfit.memory import read_status
limit = read_status().data + 20_000_000
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
import polars
print(polars.read_csv(b"epoch,loss\\n1,2.5\\n", infer_schema_length=None).to_dict(as_series=False))
"""
DETECTION = """
import json
from pathlib import Path
import numpy as np
from PIL import Image
from ultralytics import YOLO
import snugfit.integrations.ultralytics

draw = np.random.default_rng(0)
for split, count in (("train", 48), ("val", 8)):
    for kind in ("images", "labels"):
        Path("boxes", kind, split).mkdir(parents=True)
    for index in range(count):
        pixels = draw.integers(0, 100, (96, 96, 3), dtype=np.uint8)
        (left, top), (width, height), label = draw.integers(0, 56, 2), draw.integers(12, 40, 2), draw.integers(2)
        pixels[top : top + height, left : left + width, label] = 240
        Image.fromarray(pixels).save(f"boxes/images/{split}/{index}.png")
        box = np.array([left + width / 2, top + height / 2, width, height]) / 96
        Path(f"boxes/labels/{split}/{index}.txt").write_text(f"{label} " + " ".join(map(str, box)))
names = "names: {0: red, 1: green}"
Path("data.yaml").write_text(f"path: {Path('boxes').resolve()}\\ntrain: images/train\\nval: images/val\\n{names}\\n")

snugfit.prepare_process(1)

def train(memory, folder, **others):
    model = YOLO("yolo11n.yaml")
    budget = snugfit.integrations.ultralytics.MemoryBudget(model, memory)
    options = {"epochs": 2, "imgsz": 96, "batch": 16, "nbs": 16, "workers": 0} | others
    model.train(data="data.yaml", device="cpu", plots=False, project=folder, **options)
    record = budget.budget.record
    return [record.micro_batch, record.steps, record.predicted_bytes, record.measured_bytes]

"""
ROOMY = 'print(json.dumps(train("250MB", "runs")))'
CROWDED = """
boxes = ["0 0.5 0.5 0.2 0.2", *(f"1 {0.1 + number / 1500} 0.3 0.1 0.1" for number in range(1000))]
Path("boxes/labels/train/47.txt").write_text("\\n".join(boxes))
print(json.dumps(train("600MB", "runs", batch=-1, mosaic=0.0)))
"""
"""The scripts of the threads let the trainer guess its batch, on photos of which some have many boxes."""
SMALLEST = """
from snugfit.errors import InfeasibleBudgetError
try:
    train("160MB", "none")  # it holds a step, but no checkpoint
except InfeasibleBudgetError as error:
    print(error.smallest_bytes)
"""


def printed(source, folder):
    """The last line that a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=250,
        check=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1]


def test_what_checkpoints_read_results_with_is_started_before_memory_is_limited(tmp_path):
    """Threads of polars that are refused memory try again without end."""
    assert printed(CHECKPOINT, tmp_path) == b"{'epoch': [1], 'loss': [2.5]}"


def test_detection_stays_within_what_was_predicted(tmp_path):
    micro_batch, steps, predicted, measured = json.loads(printed(DETECTION + ROOMY, tmp_path))
    assert (micro_batch, steps) == (16, 6) and 0.7 * predicted < measured <= predicted <= 250_000_000


def test_crowded_images_late_in_a_data_set_are_planned(tmp_path):
    """ultralytics#1451, #4679: with a guessed batch, later epochs were refused memory, in training or validation."""
    micro_batch, steps, predicted, measured = json.loads(printed(DETECTION + CROWDED, tmp_path))
    assert (micro_batch, steps) == (16, 6) and 0.7 * predicted < measured <= predicted <= 600_000_000


def test_checkpoints_stay_within_what_was_predicted_in_the_smallest_budget(tmp_path):
    """Near it, copies of weights and of the optimizer's state need more than a step."""
    for folder in ("less", "least"):
        (tmp_path / folder).mkdir()
    least = int(printed(DETECTION + SMALLEST, tmp_path / "less"))
    trained = f"print(json.dumps(train({least}, 'runs')))"
    micro_batch, _, predicted, measured = json.loads(printed(DETECTION + trained, tmp_path / "least"))
    assert micro_batch < 16 and measured <= predicted <= least
    assert predicted < 1.1 * measured
