"""The final evaluation and the record, by hand."""

from dataclasses import replace

import pytest
import torch
from training_samples import PHASE, Source, make_run

from snugfit._core.machine_memory import MachineMemory
from snugfit._core.record import Record
from snugfit._core.run_memory import RunMemory
from snugfit._storage.files import write_json_atomic
from snugfit._storage.manifest import Manifest
from snugfit._storage.run_folder import read_record
from snugfit._training.events import Notice, RunDone
from snugfit._training.finalize import FinalEvaluation, Outcome, evaluate_model, make_record
from snugfit._training.strategy import TrainingData
from snugfit._training.task import Score
from snugfit.strategies.full_network import validate


def data(test=True):
    return TrainingData(Source(10), Source(4), Source(3) if test else None, ("even", "odd"))


def always_even(inputs):
    return torch.tensor([[1.0, 0.0]]).repeat(len(inputs), 1)


def test_accuracies_by_hand(tmp_path):
    """Validation samples 0 to 3 are half even, test samples 0 to 2 two thirds."""
    found = evaluate_model(always_even, data(), make_run(tmp_path), 2)
    assert found == FinalEvaluation(0.5, pytest.approx(2 / 3), 1.0, [[2, 0], [1, 0]])


def test_without_a_test_split_the_confusion_is_that_of_validation(tmp_path):
    assert evaluate_model(always_even, data(test=False), make_run(tmp_path), 3) == FinalEvaluation(
        0.5, None, None, [[2, 0], [2, 0]]
    )


REFUSALS = [RuntimeError("can't allocate memory"), SystemError("error return without exception set")]


@pytest.mark.parametrize("error", REFUSALS)
def test_a_refused_batch_is_halved_and_counted_once(tmp_path, error):
    events, sizes = [], []

    def two_at_most(inputs):
        sizes.append(len(inputs))
        if len(inputs) > 2:
            raise error
        return always_even(inputs)

    found = evaluate_model(two_at_most, data(), make_run(tmp_path, [events.append]), 4)
    assert found == FinalEvaluation(0.5, pytest.approx(2 / 3), 1.0, [[2, 0], [1, 0]])
    assert sizes == [4, 2, 2, 3, 2, 1]
    assert events[0] == Notice("evaluation: 4 images at once were refused memory; going on with 2")


def test_validation_after_an_epoch_is_halved_too(tmp_path):
    def three_at_most(inputs):
        if len(inputs) > 3:
            raise MemoryError("out of memory")
        return always_even(inputs)

    events = []
    phase = replace(PHASE, batch_size=4)
    assert validate(three_at_most, data(), make_run(tmp_path, [events.append]), phase) == 0.5
    assert events == [Notice("evaluation: 4 images at once were refused memory; going on with 2")]


def test_one_image_that_is_refused_is_an_error(tmp_path):
    def refusing(inputs):
        raise RuntimeError("can't allocate memory")

    with pytest.raises(RuntimeError, match="memory"):
        evaluate_model(refusing, data(), make_run(tmp_path), 2)


@pytest.mark.parametrize(
    ("forward", "count", "said"),
    [
        (always_even, 40, True),
        (lambda inputs: torch.eye(2)[inputs.flatten().long() % 2], 40, False),
        (lambda inputs: torch.eye(2)[(inputs.flatten() % 3 == 1).long()], 60, True),  # independent of the class
        (always_even, 18, False),  # too few images to tell
    ],
)
def test_a_network_that_guesses_on_validation_images_is_said_to(tmp_path, forward, count, said):
    events = []
    splits = TrainingData(Source(10), Source(count), Source(count), ("even", "odd"))
    evaluate_model(forward, splits, make_run(tmp_path, [events.append]), 8)
    assert [event.message.startswith("nothing was learned: the 2 classes") for event in events] == [True] * said


def test_most_images_of_one_class_are_no_accuracy():
    """Always the class of 90 % of the images, and half of the others too."""
    assert Score(0.9, 100, confusion=[[90, 0], [10, 0]]).at_chance
    assert not Score(0.95, 100, confusion=[[90, 0], [5, 5]]).at_chance
    assert not Score(0.0, 100).at_chance, "detection has no confusion matrix"


def test_without_validation_images_there_is_no_accuracy(tmp_path):
    nothing = TrainingData(Source(10), Source(0), Source(3), ("even", "odd"))
    assert evaluate_model(always_even, nothing, make_run(tmp_path), 2).val is None


def test_the_record_puts_prediction_beside_measurement(tmp_path):
    events = []
    run = make_run(tmp_path, [events.append], budget="100MB")
    run.memory = RunMemory(1000, 30, MachineMemory(5000))
    run.start_phase(PHASE, 0, 1, 3, 5)
    run.meter.next_peak, run.meter.total_bytes = 80, 1110
    run.position.phase_tensor_bytes, run.position.storage_bytes = 60, 5
    run.position.data_seconds = 0.25
    run.count_decoded(9)
    run.add_overhead("caching", 2.0)
    run.end_phase(PHASE, 3, 5)
    evaluation, parameters = FinalEvaluation(0.5, 0.25, 1.0, [[1]]), {"full": 9, "trained_model": 4}
    taken = {"unit": "a", "index": 0, "of": 2}
    record = make_record(run, data(), Outcome("backprop", {"micro_batch": 2}, evaluation, parameters, taken))
    assert isinstance(record, Record) and events[-1] == RunDone(record)
    assert record.predicted == {"peak_bytes": 100, "seconds": 3.0, "storage_bytes": 7, "total_memory_bytes": 1130}
    seconds = record.measured.pop("seconds")
    assert seconds >= run.position.phases[0].seconds > 0
    energy = record.measured.pop("energy_joules")
    assert energy is None or energy >= 0, "None where the machine has no counter"
    assert record.measured.pop("missed_phases") == []
    assert record.measured.pop("total_memory_bytes") == 1110 and record.measured.pop("device_memory") is None
    assert record.measured.pop("loss_scale") is None
    sizes = {"peak_bytes": 80, "tensor_peak_bytes": 60, "storage_bytes": 5, "decoded_bytes": 9}
    assert record.measured == {"peak_metric": "told", "data_seconds": 0.25, **sizes}
    limits = dict.fromkeys(("storage_bytes", "time_ratio", "total_memory_bytes", "host_memory_bytes"))
    assert record.budget == {"memory_bytes": 100_000_000, **limits}
    assert record.accuracy == {"val": 0.5, "test": 0.25, "test_top5": 1.0}
    assert record.overhead_seconds == {"profiling": 0.0, "caching": 2.0}
    assert record.phases == tuple(run.position.phases) and record.class_names == ("even", "odd")
    assert (record.enforced, record.run_dir, record.confusion) == (False, str(tmp_path), [[1]])
    assert Record.from_json(record.to_json()) == record


def test_a_phase_above_its_own_prediction_is_a_miss_although_the_run_holds(tmp_path):
    run = make_run(tmp_path, [], budget="100MB")
    low = replace(PHASE, name="low", peak_bytes=50)
    for phase, peak in ((low, 51), (PHASE, 80)):
        run.start_phase(phase, 0, 2, 3, 5)
        run.meter.next_peak = peak
        run.end_phase(phase, 3, 5)
    record = make_record(run, data(), Outcome("backprop", {}, FinalEvaluation(0.5, 0.25, 1.0, [[1]]), {}))
    assert record.predicted["total_memory_bytes"] is record.measured["total_memory_bytes"] is None, "neither is known"
    assert record.measured["peak_bytes"] == 80 <= record.predicted["peak_bytes"]
    assert record.measured["missed_phases"] == ["low"]
    write_json_atomic(tmp_path / "record.json", record.to_json())
    Manifest.of(tmp_path)
    assert read_record(tmp_path) == record
