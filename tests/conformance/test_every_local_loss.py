"""One table for every registered local loss: trains within its budget, repeats itself, resumes, exports."""

from __future__ import annotations

from typing import Any

import pytest
from row_runs import run_rows, selected, table

from snugfit.local import LOCAL_LOSSES

BUDGET = 60_000_000
VARIANTS = ["lls:basis=random,stored=false", "lls-mxm:basis=cosine,mode=paper,frequencies=spread"]
ALIKE = ("lls-m", "linear")  # lls with a factor for each class, and with a basis that is trained
LOSSES = [*LOCAL_LOSSES, *VARIANTS]
WIDE = {f"wide: {loss}": loss for loss in LOCAL_LOSSES}
SLOW = [
    name for name, loss in WIDE.items() if loss not in ("aan", "auglocal")
]  # these two have the largest auxiliary networks

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import snugfit
from safetensors.torch import load_file
from snugfit.errors import InterruptedRunError
from snugfit._training.events import StepDone
snugfit.prepare_process(1)
asked, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
losses, wide = ([name for name, loss in asked.items() if (loss is None) is runs] for runs in (True, False))

def plan(loss):
    return snugfit.plan("tiny_nets:pooled", "digits", snugfit.Budget(memory=60_000_000), epochs=3, image_size=16,
                        max_train=160, max_val=40, batch_size=32, strategy="blockwise", local_loss=loss,
                        block_units=2, exit_tolerance=1.0, optimizer="adamw", lr=0.01)

def interrupt(event):
    global seen
    seen += isinstance(event, StepDone)
    if isinstance(event, StepDone) and seen == 7:
        os.kill(os.getpid(), signal.SIGINT)

def weights(run):
    files = [*run.glob("weights/*.safetensors"), *run.glob("exits/*.safetensors")]
    return {f"{f.stem}/{f.parent.name}/{key}": value for f in sorted(files) for key, value in load_file(f).items()}

def same(one, other):
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)

found = {}
for number, loss in enumerate(losses):
    runs = [folder / f"{number}-{name}" for name in ("first", "stopped")]
    made = plan(loss)
    record = made.run((), out=runs[0])
    seen = 0
    try:
        made.run((interrupt,), out=runs[1])
        interrupted = False
    except InterruptedRunError:
        interrupted = True
    snugfit.resume(runs[1], ())
    found[loss] = {
        "record": record.to_json(), "interrupted": interrupted, "same": same(weights(runs[0]), weights(runs[1])),
        "evaluated": snugfit.evaluate(runs[0])["accuracy"],
    }
for name in wide:  # passes that train nothing must not take more than the steps that were measured
    record = snugfit.plan("tiny_nets:wide", "digits", epochs=2, image_size=32, max_train=128, max_val=128,
                          batch_size=64, strategy="blockwise", local_loss=asked[name],
                          block_units=1, optimizer="schedulefree").run((), out=folder / f"wide-{asked[name]}")
    found[name] = record.to_json()
for number, loss in enumerate(losses):  # last: ONNX's packages would count to the budget
    run = folder / f"{number}-first"
    found[loss]["difference"] = snugfit.export(run, folder / f"{number}-onnx")["onnx_max_difference"]
json.dump(found, open(folder / "found.json", "w"))
"""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every selected local loss, trained outside the process of the tests."""
    return run_rows(
        SCRIPT, selected(request, {**dict.fromkeys(LOSSES), **WIDE}), tmp_path_factory.mktemp("runs"), timeout=600
    )


@pytest.mark.timeout(700)
@pytest.mark.parametrize("loss", table(LOSSES, [*VARIANTS, *ALIKE]))
class TestEveryLocalLoss:
    def test_trains(self, found: dict[str, Any], loss: str) -> None:
        exits = found[loss]["record"]["exits"]
        assert max(exit["val_accuracy"] for exit in exits) > 0.3, "chance is 0.1"

    def test_respects_the_budget_and_its_prediction(self, found: dict[str, Any], loss: str) -> None:
        record = found[loss]["record"]
        assert record["enforced"] is True
        for phase in record["phases"]:
            assert 0 < phase["measured_peak_bytes"] <= phase["predicted_peak_bytes"] <= BUDGET, phase["name"]

    def test_a_second_run_that_is_interrupted_ends_with_the_same_weights(
        self, found: dict[str, Any], loss: str
    ) -> None:
        assert found[loss]["interrupted"] and found[loss]["same"]

    def test_leaves_an_exit_that_loads_and_exports(self, found: dict[str, Any], loss: str) -> None:
        record = found[loss]["record"]
        assert record["exit"]["index"] < record["exit"]["of"] - 1, "an exit with a classifier of the local loss"
        assert found[loss]["evaluated"] == pytest.approx(record["accuracy"]["test"], abs=1e-9)
        assert found[loss]["difference"] < 1e-3


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", table(WIDE, SLOW))
def test_no_pass_takes_more_than_its_phase_was_predicted_to(found: dict[str, Any], name: str) -> None:
    for phase in found[name]["phases"]:
        assert phase["measured_peak_bytes"] <= phase["predicted_peak_bytes"], phase["name"]
