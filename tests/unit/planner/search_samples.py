"""Searches on made-up strategies."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Shortfall
from snugfit._core.workload import Workload
from snugfit._planner import MeasurementContext, PlanningInput, StrategySelection, search
from snugfit.profiling import Probe

MB = 10**6
BUDGET = Budget("100MB")
WORKLOAD = Workload("net", "images", (3, 4, 4), 2, 10, 5, 5)
HARDWARE = Hardware("cpu", "cpu", 1, 10**9, "Linux", "2", True)


class Still:
    """Meter and limit of a process that takes nothing."""

    metric, current_bytes, peak_bytes, budget_bytes = "none", 0, 0, None
    kernel_bytes = 0
    device = torch.device("cpu")

    def restart(self):
        pass

    def mark(self):
        return 1000

    def refresh(self):
        return 0

    def allow_kernels(self):
        return nullcontext()

    def allow_address_space(self, extra_bytes):
        return nullcontext()


def made_up(name, costs=(), reasons=(), smallest=None, refusal=(), exact=False):
    """A strategy that proposes one candidate per (peak bytes, seconds, storage bytes)."""

    @dataclass(frozen=True)
    class Strategy:
        setting: int = -1

        def validate(self, workload, chain, hardware):
            return list(refusal)

        def probes(self, workload, chain, hardware):
            assert not refusal, "a strategy that cannot serve the model is asked for probes"
            return [Probe(f"{name}-probe", lambda: lambda batch: None, lambda batch: 7, 8)]

        def propose(self, workload, profile, hardware, budget):
            assert f"{name}-probe" in profile.floors and profile.units
            yield from (replace(self, setting=index) for index in range(len(costs)))

        def estimate(self, workload, profile, hardware):
            peak, seconds, storage = costs[self.setting]
            return Cost(peak, seconds / 10, seconds, storage)

        def shortfall(self, workload, profile, hardware, budget):
            return Shortfall(tuple(reasons), smallest)

    Strategy.name, Strategy.exact = name, exact
    return Strategy()


def searched(
    *strategies, budget=BUDGET, told=None, aim="time", runs=(), workload=None, meter=None, new_meter=None, **more
):
    chain = Chain.from_module(
        nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).to("meta"), (3, 4, 4)
    )
    events = [] if told is None else told
    measuring = MeasurementContext(meter or Still(), Still(), lambda *event: events.append(event), new_meter=new_meter)
    asked = {name: more.pop(name) for name in ("compares", "fresh", "profile_seconds", "free_bytes") if name in more}
    question = PlanningInput(workload or WORKLOAD, chain, HARDWARE, budget, aim, **asked)
    return search(question, StrategySelection(strategies, **more), measuring, runs)


def run(*strategies, **more):
    found = searched(*strategies, **more)
    return found.plan, found.profile


class Growing(Still):
    """A process that takes 30 MB once its memory was looked at: what preparing and measuring leave."""

    current_bytes = -30 * MB

    def restart(self):
        self.current_bytes = min(self.current_bytes + 30 * MB, 30 * MB)

    def mark(self):
        return self.current_bytes + 1000


def by_base(name, *steps, exact=False, slower=False):
    """A strategy whose settings are the largest of some steps, in MB, that the budget holds beside the base.

    A larger step is faster, or ``slower``.
    """
    strategy = made_up(name, exact=exact)

    def propose(self, workload, profile, hardware, budget):
        room = budget.memory_bytes - profile.base_bytes
        fitting = [step for step in steps if step * MB <= room]
        yield from (replace(self, setting=step) for step in fitting[-1:])

    def estimate(self, workload, profile, hardware):
        return Cost(
            profile.base_bytes + self.setting * MB, 1.0, float(self.setting) if slower else 1000.0 / self.setting
        )

    def shortfall(self, workload, profile, hardware, budget):
        return Shortfall(("too little",), profile.base_bytes + min(steps) * MB)

    type(strategy).propose, type(strategy).estimate, type(strategy).shortfall = propose, estimate, shortfall
    return strategy
