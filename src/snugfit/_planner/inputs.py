"""What a search gets: what to plan for, and strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from snugfit._chain import Chain
from snugfit._core.budget import Aim, Budget
from snugfit._core.hardware import Hardware
from snugfit._core.workload import Workload
from snugfit._training.strategy import Strategy


@dataclass(frozen=True)
class PlanningInput:
    """What a plan is made for; the chain is on the meta device, and the aim ranks candidates.

    Attributes:
        compares: whether strategies are measured, too, that cannot be chosen if the one to fine-tune with fits.
        profile_seconds: how long measuring may go on before strategies that were not measured are left out, if another
            one fits; all are measured if None.
        fresh: whether training may run in another process than measuring, which leaves memory behind.
        free_bytes: what the machine has above the processes at rest.
    """

    workload: Workload
    chain: Chain
    hardware: Hardware
    budget: Budget
    aim: Aim = "time"
    compares: bool = True
    fresh: bool = False
    profile_seconds: float | None = None
    free_bytes: int = 0


@dataclass(frozen=True)
class StrategySelection:
    """The strategies of a plan, with the user's settings.

    Attributes:
        strategies: strategies that propose candidates.
        standby: strategies that propose only if nothing else fits; if the aim is not time, only if nothing exact fits.
        left_out: names of excluded strategies, with reasons.
    """

    strategies: Sequence[Strategy]
    standby: Sequence[Strategy] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
