"""Events of a run, sent to subscribers. Training emits them and draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snugfit._core.plan import Cost
from snugfit._core.record import IntervalRecord, Record


@dataclass(frozen=True)
class Event:
    """Base of all events.

    >>> def show_epochs(event):
    ...     if isinstance(event, EpochDone):
    ...         print(f"{event.phase}, epoch {event.epoch}: training loss above 0 is {event.loss > 0}")
    >>> import snugfit
    >>> small = {"strategy": "backprop", "epochs": 2, "image_size": 8, "max_train": 32, "batch_size": 16}
    >>> record = snugfit.plan("smallconv", "digits", **small).run([show_epochs], out="runs/two_epochs")
    network, epoch 0: training loss above 0 is True
    network, epoch 1: training loss above 0 is True
    """


@dataclass(frozen=True)
class Notice(Event):
    """Information for the user, in one line."""

    message: str


@dataclass(frozen=True)
class ProbeMeasured(Event):
    """A probe was measured during profiling: ``index`` of ``count`` (from 1)."""

    name: str
    index: int
    count: int


@dataclass(frozen=True)
class RunStarted(Event):
    """Training begins (or resumes)."""

    run_dir: str
    strategy: str
    model: str
    data: str
    budget_bytes: int | None
    enforced: bool
    predicted: Cost
    resumed: bool = False


@dataclass(frozen=True)
class PhaseStarted(Event):
    """A phase begins: ``index`` of ``count`` (from 0), ``steps`` training steps in each of ``epochs`` epochs.

    Its epochs are numbered from ``first_epoch``.
    """

    name: str
    index: int
    count: int
    units: tuple[str, ...]
    batch_size: int
    epochs: int
    steps: int
    predicted_peak_bytes: int
    first_epoch: int = 0


@dataclass(frozen=True)
class TensorsSelected(Event):
    """The ``index``-th selection (from 0) was made from ``count`` tensors."""

    index: int
    interval: IntervalRecord
    count: int


@dataclass(frozen=True)
class StepDone(Event):
    """One training step: ``step`` of ``steps`` (from 1) in ``epoch`` (from 0), on ``samples`` samples.

    There is no accuracy if single samples do not determine one.
    """

    phase: str
    epoch: int
    step: int
    steps: int
    loss: float
    accuracy: float | None
    lr: float
    seconds: float
    current_bytes: int
    peak_bytes: int
    samples: int = 0


@dataclass(frozen=True)
class EpochDone(Event):
    """One epoch of a phase: mean training loss and accuracy, and validation accuracy if measured.

    ``metric`` names the validation measure, such as ``mAP50`` in detection. ``metrics`` are those from Python, by name,
    where the whole network was validated.
    """

    phase: str
    epoch: int
    epochs: int
    loss: float
    accuracy: float | None
    val_accuracy: float | None
    seconds: float
    metric: str = "accuracy"
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ExitMeasured(Event):
    """The validation accuracy of the exit after one unit."""

    phase: str
    unit: str
    index: int
    val_accuracy: float
    parameters: int


@dataclass(frozen=True)
class CacheProgress(Event):
    """Activations are being written to (or recomputed for) the cache: ``done`` of ``total`` samples."""

    phase: str
    done: int
    total: int
    bytes_written: int


@dataclass(frozen=True)
class PhaseDone(Event):
    """A phase ended, with its prediction, of which so many bytes are kept memory, and its measurement."""

    name: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    seconds: float
    predicted_kept_bytes: int = 0


@dataclass(frozen=True)
class RunDone(Event):
    """The run is complete."""

    record: Record


Subscriber = Callable[[Event], Any]
"""Called with every event, in order, in the training thread."""


def without_notices(subscribers: Sequence[Subscriber]) -> tuple[Subscriber, ...]:
    """Subscribers of everything but notices, which an earlier plan has shown."""

    def unnoted(event: Event) -> None:
        if not isinstance(event, Notice):
            for subscriber in subscribers:
                subscriber(event)

    return (unnoted,)
