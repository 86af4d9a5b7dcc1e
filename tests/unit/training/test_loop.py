"""The loop with a trainable of one weight: which steps it runs, and how it ends and goes on."""

import dataclasses
import errno
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_samples import PHASE, OneWeight, Source, make_run

from snugfit._core.workload import OptimizerSettings
from snugfit._training import run as run_module
from snugfit._training.events import EpochDone, StepDone
from snugfit._training.loop import train_phase
from snugfit._training.task import StepResult
from snugfit.errors import BudgetExceededError, DivergedError, InterruptedRunError
from snugfit.lean import LeanConv2d
from snugfit.memory import freed_memory

COSINE = OptimizerSettings(lr=0.5, schedule="cosine")


def train(run, trainable, source=None, phase=PHASE, evaluate=lambda: None, span=None):
    return train_phase(trainable, source or Source(), phase, run, evaluate, span)


def of_kind(events, kind):
    return [event for event in events if isinstance(event, kind)]


def test_every_epoch_runs_every_full_batch_in_its_order(tmp_path):
    events, trainable, source = [], OneWeight(), Source(11)
    assert train(make_run(tmp_path, [events.append]), trainable, source) == 5
    assert [(e.epoch, e.step, e.steps) for e in of_kind(events, StepDone)] == [
        (epoch, step, 5) for epoch in range(3) for step in range(1, 6)
    ]
    seen = [inputs for inputs, _, _ in trainable.calls]
    assert seen == [
        [float(s) for s in source.order(epoch)[2 * step : 2 * step + 2]] for epoch in range(3) for step in range(5)
    ]


def test_epochs_sum_up_their_steps(tmp_path):
    events = []
    train(make_run(tmp_path, [events.append]), OneWeight(), evaluate=lambda: 0.75)
    for done in of_kind(events, EpochDone):
        assert (done.loss, done.accuracy, done.val_accuracy, done.epochs) == (4.5, 0.5, 0.75, 3)
    assert [event.epoch for event in of_kind(events, EpochDone)] == [0, 1, 2]


def test_the_learning_rate_follows_its_schedule(tmp_path):
    events, trainable = [], OneWeight()
    train(make_run(tmp_path, [events.append], optimizer=COSINE), trainable)
    want = [0.5 * (1 + math.cos(math.pi * step / 15)) for step in range(15)]
    assert trainable.factors == pytest.approx(want)
    assert [event.lr for event in of_kind(events, StepDone)] == pytest.approx([0.5 * factor for factor in want])


def test_the_learning_rate_rises_in_the_warm_up_and_a_resumed_run_goes_on_with_it(tmp_path):
    warmed = dataclasses.replace(COSINE, warmup_epochs=1.0)
    rise, fall = [step / 5 for step in range(1, 6)], [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]
    trainable = OneWeight()
    train(make_run(tmp_path / "whole", optimizer=warmed), trainable)
    assert trainable.factors == pytest.approx(rise + fall)
    holder, first, second = [None], OneWeight(), OneWeight()
    first.before_step = stop_at(holder, 3)
    holder[0] = make_run(tmp_path / "run", optimizer=warmed)
    with pytest.raises(InterruptedRunError):
        train(holder[0], first)
    run = make_run(tmp_path / "run", optimizer=warmed)
    assert run.resume()
    second.load_state(run.resumed_tensors)
    train(run, second)
    assert first.factors + second.factors == trainable.factors
    assert torch.equal(second.weight, trainable.weight)


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
@pytest.mark.parametrize("step", [5, 15])
def test_a_weight_that_is_no_number_after_the_last_step_of_an_epoch_is_not_saved(tmp_path, step, wrong):
    """The loss of that step is finite, as with a gradient that is NaN."""

    class Diverging(OneWeight):
        def step(self, *arguments, **options):
            result = super().step(*arguments, **options)
            if len(self.calls) == step:
                self.weight.fill_(wrong)
            return result

    run = make_run(tmp_path)
    run.save(OneWeight().state())
    with pytest.raises(DivergedError, match=rf"value holds NaN .* epoch {step // 5 + 1}, step 1. Lower --lr"):
        train(run, Diverging())
    saved = run.checkpoints.latest()
    assert saved.position["epoch"] == step // 5 - 1
    assert all(tensor.isfinite().all() for tensor in saved.load("model").values())


def test_micro_batches_share_a_step(tmp_path):
    events, trainable = [], OneWeight(micro_batches=2)
    run = make_run(tmp_path, [events.append], epochs=1, batch_size=4)
    assert train(run, trainable, phase=dataclasses.replace(PHASE, batch_size=2)) == 2
    assert [(share, update) for _, share, update in trainable.calls] == [(0.5, False), (0.5, True)] * 2
    order = Source().order(0)
    steps = of_kind(events, StepDone)
    assert [step.loss for step in steps] == [sum(order[:4]) / 4, sum(order[4:8]) / 4]
    assert [step.samples for step in steps] == [4, 4]
    assert [step.accuracy for step in steps] == [sum(s % 2 == 0 for s in order[a : a + 4]) / 4 for a in (0, 4)]


def test_a_micro_batch_counts_as_many_times_as_it_has_images(tmp_path):
    """Five images in parts of two, two and one; nine images make one step, and four are left."""
    events, trainable = [], OneWeight(micro_batches=3)
    run = make_run(tmp_path, [events.append], epochs=1, batch_size=5)
    assert train(run, trainable, Source(9), dataclasses.replace(PHASE, batch_size=2)) == 1
    order = Source(9).order(0)
    assert [images for images, _, _ in trainable.calls] == [order[:2], order[2:4], order[4:5]]
    assert [(share, update) for _, share, update in trainable.calls] == [(0.4, False), (0.4, False), (0.2, True)]
    (step,) = of_kind(events, StepDone)
    assert step.loss == pytest.approx(sum(order[:5]) / 5) and step.samples == 5


def test_a_run_that_was_stopped_takes_the_same_parts(tmp_path):
    """Two steps of five images in parts of 2, 2 and 1; the stop is at the end of the first."""
    phase, options = dataclasses.replace(PHASE, batch_size=2), {"epochs": 1, "batch_size": 5}
    whole = OneWeight(micro_batches=3)
    train(make_run(tmp_path / "whole", **options), whole, phase=phase)
    holder, first, second = [None], OneWeight(micro_batches=3), OneWeight(micro_batches=3)
    first.before_step = stop_at(holder, 3)
    holder[0] = make_run(tmp_path / "run", **options)
    with pytest.raises(InterruptedRunError):
        train(holder[0], first, phase=phase)
    run = make_run(tmp_path / "run", **options)
    assert run.resume()
    second.load_state(run.resumed_tensors)
    train(run, second, phase=phase)
    assert first.calls + second.calls == whole.calls and [len(each) for each, _, _ in second.calls] == [2, 2, 1]
    assert torch.equal(second.weight, whole.weight)


def test_fewer_batches_than_micro_batches_make_one_step(tmp_path):
    trainable = OneWeight(micro_batches=8)
    assert train(make_run(tmp_path, epochs=1, batch_size=16, train_count=16), trainable, Source(6)) == 1
    assert [(share, update) for _, share, update in trainable.calls] == [(1 / 3, False), (1 / 3, False), (1 / 3, True)]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run_at_once(tmp_path, loss):
    class Diverging(OneWeight):
        def step(self, *arguments, **options):
            result = super().step(*arguments, **options)
            return StepResult(loss, result.correct) if len(self.calls) == 8 else result

    events, trainable = [], Diverging()
    run = make_run(tmp_path, [events.append])
    with pytest.raises(DivergedError, match=r"network, epoch 2, step 3") as error:
        train(run, trainable)
    assert error.value.exit_code == 7
    assert len(trainable.calls) == 8 and len(of_kind(events, StepDone)) == 7
    position = run.checkpoints.latest().position
    assert (position["epoch"], position["step"]) == (1, 0)


def stop_at(run_of, count):
    def before_step(number):
        if number == count:
            run_of[0].stop.request()

    return before_step


def finished(folder, **options):
    """Weight, steps and metrics of an uninterrupted run."""
    events, trainable = [], OneWeight()
    run = make_run(folder, [events.append], **options)
    train(run, trainable)
    return trainable.weight, metric_rows(run)


def metric_rows(run):
    """Rows of metrics.csv, without the columns of seconds."""
    rows = [line.split(",") for line in run.metrics.path.read_text().splitlines()]
    seconds = rows[0].index("seconds")
    return [row[:seconds] + row[seconds + 1 :] for row in rows]


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 15))
def test_a_stopped_run_goes_on_at_the_exact_step(tmp_path_factory, count):
    folder = tmp_path_factory.mktemp("run")
    weight, rows = finished(tmp_path_factory.mktemp("whole"), optimizer=COSINE)
    holder, first = [None], OneWeight()
    first.before_step = stop_at(holder, count)
    holder[0] = make_run(folder, optimizer=COSINE)
    with pytest.raises(InterruptedRunError, match=f"--resume {folder}") as error:
        train(holder[0], first)
    assert error.value.exit_code == 130 and len(first.calls) == count

    run, second = make_run(folder, optimizer=COSINE), OneWeight()
    assert run.resume()
    assert (run.position.epoch, run.position.step) == divmod(count, 5)
    assert run.resumed
    second.load_state(run.resumed_tensors)
    assert second.weight.item() != 0
    train(run, second)
    assert len(second.calls) == 15 - count
    assert torch.equal(second.weight, weight)
    assert metric_rows(run) == rows


def test_a_run_killed_between_checkpoints_repeats_the_steps_since(tmp_path):
    weight, rows = finished(tmp_path / "whole")

    def killed(number):
        if number == 9:
            raise KeyboardInterrupt

    run = make_run(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(run, OneWeight(before_step=killed))
    assert len(metric_rows(run)) == 1 + 8 + 1

    run, second = make_run(tmp_path / "run"), OneWeight()
    assert run.resume() and (run.position.epoch, run.position.step) == (1, 0)
    assert len(metric_rows(run)) == 1 + 5 + 1, "rows of steps that will be repeated are gone"
    second.load_state(run.resumed_tensors)
    train(run, second)
    assert torch.equal(second.weight, weight) and metric_rows(run) == rows


def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path):
    run = make_run(tmp_path)
    run.metrics.path.write_text("phase,epoch,step\nleft,over,rows\n")
    assert not run.resume() and not run.resumed
    trainable = OneWeight()
    train(run, trainable)
    assert len(trainable.calls) == 15 and len(metric_rows(run)) == 1 + 15 + 3


def test_checkpoints_within_an_epoch_when_they_are_due(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "CHECKPOINT_SECONDS", -1.0)
    run, saved = make_run(tmp_path, epochs=1), []
    monkeypatch.setattr(run, "save", lambda tensors: saved.append((run.position.epoch, run.position.step)))
    train(run, OneWeight())
    assert saved == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]


def test_an_epoch_that_was_complete_is_not_trained_again(tmp_path):
    run = make_run(tmp_path)
    train(run, OneWeight())
    again, trainable = make_run(tmp_path), OneWeight()
    assert again.resume() and again.position.epoch == 3
    assert train(again, trainable) == 5 and trainable.calls == []


REFUSALS = [
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    MemoryError(),
    SystemError("error return without exception set"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_refused_allocation_says_so(tmp_path, error):
    def refused(number):
        if number == 4:
            raise error

    run = make_run(tmp_path, budget="100MB")
    with pytest.raises(BudgetExceededError, match=r"memory budget of 100\.0 MB") as found:
        train(run, OneWeight(before_step=refused))
    assert found.value.exit_code == 5 and len(str(found.value).splitlines()) <= 2


def test_other_errors_of_a_step_pass_through(tmp_path):
    def broken(number):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        train(make_run(tmp_path), OneWeight(before_step=broken))


def test_the_limit_is_set_anew_at_every_step(tmp_path):
    run = make_run(tmp_path, epochs=1)
    train(run, OneWeight())
    assert run.limit.refreshes >= 5


def test_a_step_is_observed_before_its_peak_is_read(tmp_path, monkeypatch):
    """The other way round, reading the peak hides what the last layer of a step took."""
    run, order = make_run(tmp_path, epochs=1), []
    mark = run.meter.mark
    monkeypatch.setattr(run.freed, "after_step", lambda: order.append("step"))
    monkeypatch.setattr(run.meter, "mark", lambda: (order.append("mark"), mark())[1])
    train(run, OneWeight(before_step=lambda count: order.append("trains")))
    assert order.count("step") == 5
    for index in (index for index, each in enumerate(order) if each == "trains"):
        assert order[index + 1] == "step"


def test_freed_memory_goes_back_after_the_last_epoch_alone(tmp_path, monkeypatch):
    """A phase may be trained in parts, each of some epochs."""
    run, closed = make_run(tmp_path, epochs=3), []
    monkeypatch.setattr(run.freed, "close", lambda: closed.append(run.position.epoch))
    for first in range(3):
        train(run, OneWeight(), span=range(first, first + 1))
    assert closed == [3]


KEEPING = dataclasses.replace(PHASE, kept_bytes=50)


@pytest.mark.parametrize(
    ("phase", "budget", "keeps"), [(PHASE, None, True), (KEEPING, None, True), (KEEPING, 0, False)]
)
def test_freed_memory_is_kept_in_steps_and_passes_if_the_limit_has_room(phase, budget, keeps, tmp_path, monkeypatch):
    for name in ("set_thresholds", "hold_free_blocks", "free_held_blocks"):
        monkeypatch.setattr(freed_memory, name, lambda *_: True)
    run, seen = make_run(tmp_path), {"step": [], "statistics": [], "validation": []}
    run.limit.budget_bytes = budget

    class Watching(OneWeight):
        def step(self, *batch):
            seen["step"].append(run.freed.keeps)
            return super().step(*batch)

        def settle(self, batches):
            seen["statistics"].append(run.freed.keeps)

    run.start_phase(dataclasses.replace(phase, peak_bytes=10**9), 0, 1, 3, 5)
    train(run, Watching(), phase=phase, evaluate=lambda: seen["validation"].append(run.freed.keeps))
    assert not seen["step"][0] and set(seen["step"][1:]) == {keeps}
    assert seen["statistics"] == [keeps] * 3 and seen["validation"] == [False] * 3, (
        "a strategy keeps it as it validates"
    )


@pytest.mark.parametrize(("kept", "in_parts"), [(0, True), (10**8, True), (6 * 10**8, False)])
def test_gradients_come_in_parts_unless_there_is_ample_room(kept, in_parts, tmp_path):
    run, seen = make_run(tmp_path), []

    class Watching(OneWeight):
        def step(self, *batch):
            seen.append(LeanConv2d.takes_parts)
            return super().step(*batch)

    phase = dataclasses.replace(PHASE, peak_bytes=10**9, kept_bytes=kept)
    run.start_phase(phase, 0, 1, 3, 5)
    train(run, Watching(), phase=phase)
    assert set(seen) == {in_parts}
    assert LeanConv2d.takes_parts
