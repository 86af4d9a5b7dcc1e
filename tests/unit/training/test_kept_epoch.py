"""The epoch whose weights a run keeps: the best on validation images, a later one among equals, or the last."""

import errno
import math

import pytest
import torch
from training_samples import PHASE, OneWeight, Source, make_run

from snugfit._core.record import KeptEpoch
from snugfit._core.workload import OptimizerSettings
from snugfit._storage import files
from snugfit._training.events import Notice
from snugfit._training.kept_epoch import restore_kept
from snugfit._training.loop import train_phase
from snugfit.errors import InterruptedRunError, OutOfStorageError

ACCURACIES = [0.2, 0.7, 0.5]


class Validation:
    """Accuracies by epoch of a run."""

    def __init__(self, run, accuracies=ACCURACIES):
        self.run, self.accuracies = run, accuracies

    def __call__(self):
        return self.accuracies[self.run.position.epoch]


def trained(folder, accuracies=ACCURACIES, resume=False, trainable=None, **changes):
    """A run and its weight at the end."""
    run, trainable = make_run(folder, **changes), trainable or OneWeight()
    if resume and run.resume():
        trainable.load_state(run.resumed_tensors)
    train_phase(trainable, Source(), PHASE, run, Validation(run, accuracies))
    return run, trainable.weight


def stopped_at(folder, count):
    """A run that is stopped after so many steps."""
    run, trainable = make_run(folder), OneWeight()
    trainable.before_step = lambda number: run.stop.request() if number == count else None
    with pytest.raises(InterruptedRunError):
        train_phase(trainable, Source(), PHASE, run, Validation(run))


def stored(run):
    return sorted(path.name for path in (run.folder / "best").glob("*"))


@pytest.mark.parametrize(
    ("accuracies", "epoch"),
    [([0.2, 0.7, 0.5], 1), ([0.9, 0.7, 0.5], 0), ([0.2, 0.3, 0.5], 2), ([0.5, 0.5, 0.1], 1), ([0.5, 0.1, 0.5], 2)],
)
def test_the_best_epochs_weights_are_kept_and_the_later_ones_of_equals(tmp_path, accuracies, epoch):
    run, weight = trained(tmp_path / "best", accuracies)
    assert run.position.kept == KeptEpoch(epoch, accuracies[epoch])
    _, there = trained(tmp_path / "there", accuracies, epochs=epoch + 1, keep="last")
    assert torch.equal(weight, there)


def test_the_last_epochs_weights_are_kept_on_request(tmp_path):
    run, weight = trained(tmp_path / "last", keep="last")
    assert run.position.kept == KeptEpoch(2, 0.5) and stored(run) == []
    assert not torch.equal(weight, trained(tmp_path / "best")[1])


@pytest.mark.parametrize("evaluate", [None, lambda: None])
def test_without_validation_the_last_epochs_weights_are_kept(tmp_path, evaluate):
    run, trainable = make_run(tmp_path / "none"), OneWeight()
    train_phase(trainable, Source(), PHASE, run, evaluate)
    assert run.position.kept == (None if evaluate is None else KeptEpoch(2)) and stored(run) == []
    assert torch.equal(trainable.weight, trained(tmp_path / "last", keep="last")[1])


def test_one_file_holds_them_and_the_manifest_lists_it(tmp_path):
    seen = []

    class Watching(Validation):
        def __call__(self):
            seen.append(stored(self.run))
            return super().__call__()

    run = make_run(tmp_path, epochs=4)
    train_phase(OneWeight(), Source(), PHASE, run, Watching(run, [0.1, 0.2, 0.1, 0.1]))
    first, second = "epoch_0000.safetensors", "epoch_0001.safetensors"
    assert seen == [[], [first], [second], [second]] and stored(run) == [second]
    run.manifest.check(f"best/{second}")
    run.kept_weights.remove_all()
    assert not (tmp_path / "best").exists() and not [name for name in run.manifest.names if "best" in name]


@pytest.mark.parametrize("count", range(1, 16))
def test_a_stopped_run_keeps_the_best_so_far(tmp_path, count):
    whole, weight = trained(tmp_path / "whole")
    stopped_at(tmp_path / "run", count)
    run, resumed = trained(tmp_path / "run", resume=True)
    assert torch.equal(resumed, weight) and run.position.kept == whole.position.kept


def test_a_run_killed_before_the_checkpoint_of_a_better_epoch_still_has_the_former(tmp_path, monkeypatch):
    """The interrupted epoch turns out worse when it is repeated, as it may where kernels are not deterministic."""
    accuracies = [0.5, 0.9, 0.1]
    run, trainable = make_run(tmp_path), OneWeight()
    save = run.save

    def killed(tensors):
        if run.position.epoch == 2:
            raise KeyboardInterrupt
        save(tensors)

    monkeypatch.setattr(run, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        train_phase(trainable, Source(), PHASE, run, Validation(run, accuracies))
    assert len(stored(run)) == 2
    again, weight = trained(tmp_path, [0.5, 0.4, 0.1], resume=True)
    assert again.position.kept == KeptEpoch(0, 0.5) and stored(again) == ["epoch_0000.safetensors"]
    assert torch.equal(weight, trained(tmp_path / "there", epochs=1)[1])


def test_a_full_disk_is_an_error_and_the_run_goes_on_later(tmp_path, monkeypatch):
    _, weight = trained(tmp_path / "whole")
    sync = files.sync_file

    def full(file):
        if "epoch_0001" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    with monkeypatch.context() as disk, pytest.raises(OutOfStorageError, match=r"best/epoch_0001") as error:
        disk.setattr(files, "sync_file", full)
        trained(tmp_path / "run")
    assert error.value.exit_code == 6
    assert torch.equal(trained(tmp_path / "run", resume=True)[1], weight)


def test_an_interrupted_run_restores_after_its_last_epoch(tmp_path):
    """Between the last checkpoint and the record, and in strategies that then train no more."""
    _, weight = trained(tmp_path)
    run, trainable = make_run(tmp_path), OneWeight()
    assert run.resume() and run.position.epoch == 3
    trainable.load_state(run.resumed_tensors)
    assert not torch.equal(trainable.weight, weight)
    restore_kept(trainable, run)
    assert torch.equal(trainable.weight, weight)


def test_a_network_that_changes_is_compared_from_then_on(tmp_path):
    """As after channels were removed: the larger network's epochs no longer count."""
    run, trainable = make_run(tmp_path), OneWeight()
    accuracies = Validation(run, [0.9, 0.2, 0.1])
    for epoch in range(3):
        train_phase(trainable, Source(), PHASE, run, accuracies, range(epoch, epoch + 1))
        if epoch == 0:
            run.position.kept = None
            run.save(trainable.state())
            assert stored(run) == []
    assert run.position.kept == KeptEpoch(1, 0.2)
    assert math.isfinite(trainable.weight)


@pytest.mark.parametrize(
    ("accuracies", "patience", "epochs", "kept"),
    [
        ([0.2, 0.7, 0.5, 0.6, 0.9, 0.9], 2, 4, 1),
        ([0.2, 0.7, 0.5, 0.6, 0.9, 0.8], 3, 6, 4),
        ([0.5, 0.5, 0.5, 0.5, 0.5, 0.5], 1, 2, 1),  # the same is not better, but the later of equals is kept
        ([0.5, 0.4, 0.3, 0.2, 0.1, 0.0], 5, 6, 0),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 1, 6, 5),
    ],
)
def test_training_ends_after_epochs_without_a_better_accuracy(tmp_path, accuracies, patience, epochs, kept):
    """The weights are the best epoch's, and the learning rate that of all six epochs."""
    events, cosine = [], OptimizerSettings(lr=0.5)
    trainable = OneWeight()
    run = make_run(tmp_path / "run", [events.append], epochs=6, patience=patience, optimizer=cosine)
    train_phase(trainable, Source(), PHASE, run, Validation(run, accuracies))
    assert (run.position.epoch, run.position.kept.epoch) == (epochs, kept)
    whole = OneWeight()
    other = make_run(tmp_path / "whole", epochs=6, optimizer=cosine)
    train_phase(whole, Source(), PHASE, other, Validation(other, accuracies[: kept + 1] + [-1.0] * (5 - kept)))
    assert torch.equal(trainable.weight, whole.weight)
    assert trainable.factors == whole.factors[: 5 * epochs]
    said = [event.message for event in events if isinstance(event, Notice)]
    assert len(said) == (epochs < 6) and all(f"after epoch {epochs} of 6" in message for message in said)


def test_a_last_epoch_to_keep_is_the_one_that_patience_ended_with(tmp_path):
    run, weight = trained(tmp_path / "a", [0.7, 0.5, 0.6], patience=1, keep="last")
    assert (run.position.epoch, run.position.kept) == (2, KeptEpoch(1, 0.5))
    other, there = trained(tmp_path / "b", [0.7, 0.5], epochs=2, keep="last")
    assert torch.equal(weight, there) and stored(run) == stored(other) == []


@pytest.mark.parametrize("count", [4, 5, 8, 10])
def test_patience_goes_on_where_a_run_was_stopped(tmp_path, count):
    """Within an epoch and at its end; also behind the last one, before the run was recorded."""
    accuracies, changes = [0.7, 0.5, 0.6, 0.9], {"epochs": 4, "patience": 1}
    run, weight = trained(tmp_path / "whole", accuracies, **changes)
    assert run.position.epoch == 2
    stopped, trainable = make_run(tmp_path / "run", **changes), OneWeight()
    trainable.before_step = lambda number: stopped.stop.request() if number == count else None
    with pytest.raises(InterruptedRunError):
        train_phase(trainable, Source(), PHASE, stopped, Validation(stopped, accuracies))
    again, resumed = trained(tmp_path / "run", accuracies, resume=True, **changes)
    assert again.position.epoch == 2 and torch.equal(resumed, weight)
