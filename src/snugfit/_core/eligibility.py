"""Which strategies ``auto`` considers for a request, and why it leaves out the others: one row per reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from snugfit._core.registry import NAMED_ONLY, STRATEGIES, TILED, TIMED, TRANSFER
from snugfit._core.request import Request

LAST_RESORT = "on one device tiles save memory and no time: measured only where nothing else fits"
"""Why tile after tile was not looked at, where something else fits."""
LAST_EXACT_RESORT = "on one device tiles save memory and no time: measured only where nothing else that is exact fits"
"""The same, where the aim is not time."""


@dataclass(frozen=True)
class Reason:
    """Why a strategy is left out.

    Attributes:
        holds: whether it applies to a strategy and a request.
        words: the reason.
    """

    holds: Callable[[str, Request], bool]
    words: str


def _timed(request: Request) -> bool:
    return request.budget.time_ratio is not None


REASONS: tuple[Reason, ...] = (
    Reason(lambda name, _: name in NAMED_ONLY, "there to compare with, where it is named: --strategy {name}"),
    Reason(lambda name, request: name not in TIMED and _timed(request), "cannot keep a time ratio"),
    Reason(lambda name, request: name in TIMED and not _timed(request), "takes a --time-ratio to keep to, like 0.5"),
    Reason(
        lambda name, request: name in TRANSFER and request.model.weights is None,
        "needs pre-trained --weights, since it leaves them as they are",
    ),
    Reason(
        lambda name, request: name in TILED and request.budget.devices == 1 and request.budget.memory is None,
        "several --devices share a network, or tiles of one save memory; neither was asked for",
    ),
)


def left_out(request: Request) -> dict[str, str]:
    """The strategies that ``auto`` does not consider for a request, in order, with the reason."""
    found = {}
    for name in STRATEGIES:
        reason = next((each for each in REASONS if each.holds(name, request)), None)
        if reason is not None:
            found[name] = reason.words.format(name=name)
    return found


def stands_by(name: str, request: Request) -> bool:
    """Whether ``auto`` looks at a strategy only where others leave something to be wished for."""
    return request.strategy.strategy == "auto" and name in TILED and request.budget.devices == 1
