"""What is written for TensorBoard, to a writer that stands for tensorboard's."""

import atexit

import pytest

from snugfit._report import tensorboard
from snugfit._training.events import EpochDone, RunDone, RunStarted, StepDone


class Writer:
    def __init__(self, folder, **_):
        self.folder, self.written, self.closed = folder, [], 0

    def add_scalar(self, *row):
        self.written.append(row)

    def close(self):
        self.closed += 1


@pytest.fixture
def ends(monkeypatch):
    """Functions that are called as the process ends."""
    found = []
    monkeypatch.setattr(tensorboard, "SummaryWriter", Writer, raising=False)
    monkeypatch.setattr(atexit, "register", found.append)
    monkeypatch.setattr(atexit, "unregister", found.remove)
    return found


def step(epoch, number):
    return StepDone(
        "network", epoch, number, 4, loss=0.5, accuracy=None, lr=0.1, seconds=1.0, current_bytes=1, peak_bytes=7
    )


def started(resumed):
    events = tensorboard.TensorBoardEvents()
    events(RunStarted("run", "backprop", "vgg8", "digits", None, True, None, resumed))
    return events


def test_a_resumed_run_continues_its_curves(ends):
    events = started(resumed=True)
    events(step(2, 3))
    assert events._writer.folder == "run"
    assert events._writer.written == [("network/loss", 0.5, 11), ("network/lr", 0.1, 11), ("network/peak_bytes", 7, 11)]


def test_the_writer_is_closed_once_the_run_or_the_process_ends(ends):
    events = started(resumed=False)
    events(EpochDone("network", 0, 1, 0.5, None, 0.25, 1.0))
    assert events._writer.written == [("network/val_accuracy", 0.25, 0)] and ends == [events._writer.close]
    events(RunDone(None))
    assert events._writer.closed == 1 and ends == []
