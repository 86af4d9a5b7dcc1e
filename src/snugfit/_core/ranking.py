"""Ranking of candidates by the user's aim."""

from __future__ import annotations

from collections.abc import Iterable

from snugfit._core.budget import Aim
from snugfit._core.plan import Candidate
from snugfit._core.registry import find_config

Key = tuple[float, ...]


def default_aim(*, transfers: bool) -> Aim:
    """The default aim: accuracy with pre-trained weights, otherwise time."""
    return "accuracy" if transfers else "time"


def ranked(candidates: Iterable[Candidate], aim: Aim = "time") -> tuple[Candidate, ...]:
    """Candidates: feasible ones first, best first; those not considered last."""
    keys = {"time": _by_time, "memory": _by_memory, "accuracy": _by_accuracy}[aim]
    return tuple(sorted(candidates, key=lambda each: (not each.feasible, not each.considered, *keys(each))))


def expected_loss(candidate: Candidate) -> int:
    """Expected loss of accuracy of a strategy, as an ordinal number.

    Training every weight by its own gradient loses nothing. A frozen network with a small trained one loses less than
    local losses, or than training a part of the network.
    """
    config = find_config(candidate.strategy)
    return 0 if candidate.exact else config.expected_loss if config else 2


def _seconds(candidate: Candidate) -> float:
    return candidate.predicted.seconds if candidate.predicted else float("inf")


def _peak(candidate: Candidate) -> float:
    return candidate.predicted.peak_bytes if candidate.predicted else float("inf")


def _by_time(candidate: Candidate) -> Key:
    return (_seconds(candidate), _peak(candidate))


def _by_memory(candidate: Candidate) -> Key:
    return (_peak(candidate), _seconds(candidate))


def _by_accuracy(candidate: Candidate) -> Key:
    return (expected_loss(candidate), _seconds(candidate), _peak(candidate))
