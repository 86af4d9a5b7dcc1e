"""TensorBoard events in the run folder, if tensorboard is installed (the ``logs`` extra)."""

from __future__ import annotations

import atexit
from typing import Any

from snugfit._training.events import EpochDone, Event, ExitMeasured, RunDone, RunStarted, StepDone, Subscriber

try:  # before the memory baseline: the import alone takes memory
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True


class TensorBoardEvents:
    """Subscriber that writes loss, accuracy, learning rate and memory per step, and validation accuracy per epoch.

    Steps are counted within a phase, so that a resumed run continues its curves.
    """

    def __init__(self) -> None:
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        """Write an event."""
        if isinstance(event, RunStarted):
            self._writer = SummaryWriter(event.run_dir, max_queue=100)
            atexit.register(self._writer.close)  # of an interrupted run, too, whose last events would be lost
        elif self._writer is None:
            return
        elif isinstance(event, StepDone):
            self._write_step(event)
        elif isinstance(event, EpochDone) and event.val_accuracy is not None:
            name = "val_accuracy" if event.metric == "accuracy" else f"val_{event.metric}"
            self._writer.add_scalar(f"{event.phase}/{name}", event.val_accuracy, event.epoch)
            for own, value in event.metrics.items():
                if value is not None:
                    self._writer.add_scalar(f"{event.phase}/val/{own}", value, event.epoch)
        elif isinstance(event, ExitMeasured):
            self._writer.add_scalar("exits/val_accuracy", event.val_accuracy, event.index)
        elif isinstance(event, RunDone):
            self._writer.close()
            atexit.unregister(self._writer.close)

    def _write_step(self, event: StepDone) -> None:
        step = event.epoch * event.steps + event.step
        for name in ("loss", "accuracy", "lr", "peak_bytes"):
            if (value := getattr(event, name)) is not None:
                self._writer.add_scalar(f"{event.phase}/{name}", value, step)


def tensorboard_subscribers() -> tuple[Subscriber, ...]:
    """A subscriber if tensorboard is installed, none otherwise."""
    return (TensorBoardEvents(),) if INSTALLED else ()
