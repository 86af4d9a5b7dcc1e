"""Search over strategies: measure their probes, collect proposals, rank those that fit."""

from snugfit._planner.calibration import PastRun, corrected, past_run
from snugfit._planner.search import MeasurementContext, PlanningInput, StrategySelection, infeasible_error, search

__all__ = [
    "MeasurementContext",
    "PastRun",
    "PlanningInput",
    "StrategySelection",
    "corrected",
    "infeasible_error",
    "past_run",
    "search",
]
