"""The largest batch at which a probe is measured."""

from dataclasses import replace

import pytest
from probe_samples import Machine, probe

from snugfit.memory.process import PageMapping
from snugfit.profiling import measure_probe


@pytest.fixture(autouse=True)
def no_collecting(monkeypatch):
    """Collecting garbage takes a tenth of a second, and nothing here makes any."""
    for module in ("probe", "measuring"):
        monkeypatch.setattr(f"snugfit.profiling.{module}.release_memory", lambda: None)


def test_the_largest_batch_measured_is_what_the_budget_holds():
    """(2540 - 1000 - 500) / 10 = 104 samples; predictions round up by a byte."""
    machine = Machine(budget=2540)
    made, ran = probe(machine, fixed=500, sample=10, limit=512)
    line = measure_probe(made, machine, machine)
    assert line.points[-1].batch == 103 and max(ran) == 103
    assert line.largest_batch(2540 - 1000, 512) == 103


def test_only_batches_that_may_be_chosen_are_measured_at_the_end():
    machine = Machine(budget=2540)
    made, _ = probe(machine, fixed=500, sample=10, limit=512, sizes=(1, 2, 4, 8, 16, 32, 64, 128))
    assert measure_probe(made, machine, machine).points[-1].batch == 64


def test_the_largest_batch_is_measured_where_training_would_use_it():
    """Of 1540 bytes a step may take 1200; of the 70 samples in them 64 may be chosen, and of 103 in all bytes 100."""
    machine, sizes = Machine(budget=2540), (1, 2, 4, 8, 16, 32, 64, 100)
    made, _ = probe(machine, fixed=500, sample=10, limit=512, sizes=sizes)
    assert measure_probe(made, machine, machine).points[-1].batch == 100
    made = replace(made, headroom=lambda available, shape_bytes: available - 340 - shape_bytes)
    assert measure_probe(made, machine, machine).points[-1].batch == 64


def test_a_step_that_grows_faster_than_its_line_is_tried_smaller():
    machine = Machine(budget=3000)

    def superlinear(batch):
        if batch > 60:
            machine.take(5000)

    made, _ = probe(machine, fixed=500, sample=10, limit=100, on_step=superlinear)
    assert [point.batch for point in measure_probe(made, machine, machine).points] == [2, 8, 51]


def test_long_steps_are_not_measured_at_the_largest_batch_and_more_is_allowed_for(monkeypatch):
    machine = Machine(budget=100_000)
    made, ran = probe(machine, 1000, 100)

    def timed(step, batch, device):
        step(batch)
        return 0.05 * batch, PageMapping(0.0, 0)

    monkeypatch.setattr("snugfit.profiling.probe._timed", timed)
    line = measure_probe(made, machine, machine)
    assert [point.batch for point in line.points] == [2, 8, 20]
    assert max(ran) == 20, "which takes a second"
    assert line.seconds_at(64) == pytest.approx(3.2)
    assert line.bytes_at(64) == 1000 + 6400 + 0.2 * 44 * 100 + 1 and line.bytes_at(20) == 3001
    assert all(line.bytes_at(batch) >= 1000 + 100 * batch for batch in range(2, 65))
    patient = measure_probe(replace(made, longest_seconds=4.0), machine, machine)
    assert [point.batch for point in patient.points] == [2, 8, 64], "which takes 3.2 seconds"
    hasty = measure_probe(replace(made, longest_seconds=0.55, batch_limit=32), machine, machine)
    assert [point.batch for point in hasty.points] == [2, 8], "11 would hardly tell more than 8"
    near = measure_probe(replace(made, longest_seconds=0.45, batch_limit=11), machine, machine)
    assert [point.batch for point in near.points] == [2, 8] and near.bytes_at(11) == 1000 + 1100 + 0.2 * 3 * 100 + 1


def test_more_is_allowed_for_where_nothing_is_known_of_larger_batches(monkeypatch):
    """A library's own step and a network that cannot run on the meta device have no floors that grow."""
    machine = Machine(budget=100_000)
    made, _ = probe(machine, 1000, 100, floor=lambda batch: 0)
    took = PageMapping(0.0, 0)
    monkeypatch.setattr(
        "snugfit.profiling.probe._timed", lambda step, batch, device: (step(batch) or 0.05 * batch, took)
    )
    line = measure_probe(made, machine, machine)
    assert line.measured_batch == 20 and line.bytes_at(64) == 1000 + 6400 + 0.2 * 44 * 100 + 1


def test_batches_that_did_not_fit_beside_what_measuring_leaves_are_bounded_by_their_tensors():
    """Each sample beyond the eighth needs four times as much as those before, which the line does not know."""
    machine = Machine(budget=2600)

    def tensors(batch):
        return 500 + 10 * batch + 30 * max(batch - 8, 0)

    made, _ = probe(
        machine, 500, 10, floor=tensors, sizes=(2, 8, 64), on_step=lambda batch: machine.take(tensors(batch))
    )
    line = measure_probe(made, machine, machine)
    assert [point.batch for point in line.points] == [2, 8]
    assert all(tensors(batch) <= line.bytes_at(batch) <= 1.2 * tensors(batch) for batch in range(2, 65))
