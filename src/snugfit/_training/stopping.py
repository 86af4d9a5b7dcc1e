"""Stop a run between two steps at the request of the user or the system."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopFlag:
    """Context that turns SIGINT and SIGTERM into a flag, which the loop reads after every step.

    A second signal is no longer caught, so that an impatient user can still end the process; the state then is that of
    the last checkpoint. Outside the main thread signals cannot be caught and the flag is only set by :meth:`request`.

    >>> import snugfit
    >>> stop = StopFlag()
    >>> def stop_at_step_2(event):
    ...     if isinstance(event, snugfit.StepDone) and event.step == 2:
    ...         stop.request()
    >>> small = {"strategy": "backprop", "epochs": 1, "image_size": 8, "max_train": 64, "batch_size": 16}
    >>> snugfit.plan("smallconv", "digits", **small).run([stop_at_step_2], out="runs/two_steps", stop=stop)
    Traceback (most recent call last):
    snugfit.errors.InterruptedRunError: stopped; continue with: snugfit train --resume runs/two_steps
    >>> snugfit.resume("runs/two_steps", subscribers=()).accuracy["test"] >= 0
    True
    """

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._requested.is_set()

    def request(self) -> None:
        """Request a stop after the current step."""
        self._requested.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request()
        self._restore()

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
