"""Time left in a run: the plan's predicted seconds, scaled by the seconds measured so far."""

from __future__ import annotations

from snugfit._core.plan import Cost

PRIOR = 0.02
"""Share of the predicted time for which the prediction is trusted against the measurement."""


class TimeLeft:
    """Estimates the seconds that remain, phase by phase.

    Args:
        predicted: the plan's cost.
        started: clock reading at which the run (or its resumption) began.
    """

    def __init__(self, predicted: Cost, started: float) -> None:
        self._predicted, self._started = predicted, started
        self._done = self._current = self._share = self._taken_up = 0.0
        self._later = predicted.seconds

    def start_phase(self, name: str, index: int, count: int) -> None:
        """Start a phase, ``index`` of ``count``; phases that a resumed run skips do not count."""
        phases = self._predicted.phases
        at = next((i for i, phase in enumerate(phases) if phase.name == name), index)
        if at < len(phases):
            self._current = phases[at].seconds
            self._later = sum(phase.seconds for phase in phases[at + 1 :])
        else:
            self._current = self._predicted.seconds / max(count, 1)
            self._later = self._current * max(count - index - 1, 0)
        self._share, self._taken_up = 0.0, 0.0

    def progress(self, share: float, *, first: bool = False) -> None:
        """Set the finished share of the phase, in [0, 1]; ``first`` if a resumed run starts there."""
        self._share = min(share, 1.0)
        if first:
            self._taken_up = self._share

    def end_phase(self) -> None:
        """End the phase."""
        self._done += self._current * (1 - self._taken_up)
        self._current = self._share = self._taken_up = 0.0

    def seconds(self, now: float) -> float:
        """Seconds left at clock reading ``now``."""
        done = self._done + self._current * (self._share - self._taken_up)
        left = self._current * (1 - self._share) + self._later
        prior = PRIOR * self._predicted.seconds
        scale = (now - self._started + prior) / (done + prior) if done + prior > 0 else 1.0
        return scale * left
