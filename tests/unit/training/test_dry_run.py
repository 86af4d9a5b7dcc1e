"""Rehearsals: at which batch a phase runs, and what is noted of it."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from training_samples import PHASE, make_run

from snugfit._training.dry_run import SPARE_BYTES, dry_run_phase
from snugfit._training.events import Notice
from snugfit._training.network import NetworkTrainer
from snugfit.errors import BudgetExceededError
from snugfit.memory.tensors import tensor_peak_bytes

EIGHT = dataclasses.replace(PHASE, batch_size=8)


@pytest.fixture(autouse=True)
def no_collecting(monkeypatch):
    """Collecting garbage takes a tenth of a second, and nothing here makes any."""
    monkeypatch.setattr("snugfit._training.dry_run.release_memory", lambda: None)


class Refusing:
    """Takes batches of at most ``most`` samples."""

    def __init__(self, most, micro_batches=1, error=None):
        self.most, self.micro_batches, self.modules = most, micro_batches, [nn.Linear(1, 1)]
        self.error = error or RuntimeError("can't allocate memory")
        self.steps = []

    def state(self):
        return {"model": dict(self.modules[0].state_dict())}

    def step(self, inputs, labels, share=1.0, update=True):
        self.steps.append((len(inputs), update))
        if len(inputs) > self.most:
            raise self.error


def batch(size):
    return torch.zeros(size, 1), torch.zeros(size, dtype=torch.int64)


def rehearsed(run, most, smaller=(6, 4, 2, 1), made=None, **options):
    def make(size):
        trainable = Refusing(most, **options)
        if made is not None:
            made.append((size, trainable))
        return trainable

    return dry_run_phase(EIGHT, smaller, make, batch, run)


def again(folder):
    run = make_run(folder)
    assert run.resume() and not run.resumed
    return run


def test_a_refused_step_leaves_no_gradients_to_the_next_batch(tmp_path):
    shared, seen = nn.Linear(1, 1), []

    class HalfWay(Refusing):
        def step(self, inputs, labels, share=1.0, update=True):
            seen.append(shared.weight.grad)
            shared(torch.ones(1, 1)).sum().backward()
            super().step(inputs, labels, share, update)

    def make(size):
        trainable = HalfWay(4)
        trainable.modules = [shared]
        return trainable

    assert dry_run_phase(EIGHT, (6, 4), make, batch, make_run(tmp_path)).batch_size == 4
    assert seen[:3] == [None, None, None]


def test_a_phase_that_fits_is_left_as_it_is(tmp_path):
    events, made = [], []
    run = make_run(tmp_path, [events.append])
    assert rehearsed(run, 8, made=made) == EIGHT
    assert [size for size, _ in made] == [8] and events == []
    assert run.position.notes == {"batches": {"network": 8}}


@pytest.mark.parametrize("error", [None, SystemError("error return without exception set")])
def test_a_refused_one_goes_on_at_the_next_smaller_and_says_so(tmp_path, error):
    events, made = [], []
    run = make_run(tmp_path, [events.append])
    assert rehearsed(run, 5, made=made, error=error) == dataclasses.replace(EIGHT, batch_size=4)
    assert [size for size, _ in made] == [8, 6, 4]
    assert events == [Notice("network: batch 8 was refused memory; training at 4")]
    assert again(tmp_path).position.notes == {"batches": {"network": 4}}, "a process that takes it up does the same"


def test_one_that_fits_at_no_batch(tmp_path):
    with pytest.raises(BudgetExceededError, match=r"network needs more than the memory budget of 50\.0 MB"):
        rehearsed(make_run(tmp_path, budget="50MB"), 0)


def test_other_errors_pass_through(tmp_path):
    with pytest.raises(ValueError, match="labels"):
        rehearsed(make_run(tmp_path), 4, error=ValueError("labels"))


def test_on_resume_the_batch_is_the_one_found_before(tmp_path):
    run = make_run(tmp_path)
    rehearsed(run, 5)
    run.position.step = 1
    run.save({})
    again, made = make_run(tmp_path), []
    again.resume()
    assert rehearsed(again, 100, made=made).batch_size == 4
    assert [size for size, _ in made] == [4]


def test_both_kinds_of_micro_batch_are_run(tmp_path):
    made = []
    rehearsed(make_run(tmp_path, batch_size=32, train_count=32), 8, made=made, micro_batches=4)
    assert made[0][1].steps == [(8, False), (8, True)] * 2, "the second time with optimizer state"


def test_the_largest_micro_batch_follows_the_smallest_whose_gradients_are_held(tmp_path):
    made = []
    rehearsed(make_run(tmp_path, batch_size=30, train_count=32), 8, made=made, micro_batches=4)
    assert made[0][1].steps == [(7, False), (8, True)] * 2


def test_a_part_of_the_budget_is_reserved_meanwhile(tmp_path):
    run = make_run(tmp_path)
    rehearsed(run, 5)
    assert SPARE_BYTES in run.limit.spares and run.limit.reserved_bytes == 0


def network():
    return nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 2))


def images(size):
    return torch.zeros(size, 100), torch.zeros(size, dtype=torch.int64)


def trainer(run):
    module = network()
    return NetworkTrainer(module, module, run.workload)


def test_tensor_bytes_are_those_of_a_step_with_optimizer_state(tmp_path):
    run = make_run(tmp_path)
    dry_run_phase(EIGHT, (), lambda size: trainer(run), images, run)
    made, given = trainer(run), images(8)
    made.step(*given)
    momentum = made.state()["optimizer"].values()
    weights = sum(parameter.nbytes for parameter in made.module.parameters())
    assert sum(tensor.nbytes for tensor in momentum) == weights
    want = tensor_peak_bytes(lambda: made.step(*given), [*made.modules, *momentum, *given])
    assert run.position.phase_tensor_bytes == want > 2 * weights


def test_what_was_rehearsed_is_dropped(tmp_path):
    run, references = make_run(tmp_path), []

    def make(size):
        made = trainer(run)
        references.extend(weakref.ref(parameter) for parameter in made.module.parameters())
        return made

    dry_run_phase(EIGHT, (), make, images, run)
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_the_peak_of_a_rehearsal_counts_to_the_phase(tmp_path):
    run = make_run(tmp_path)
    run.meter.next_peak = 77
    rehearsed(run, 8)
    assert run.position.phase_peak_bytes == run.position.peak_bytes == 77
