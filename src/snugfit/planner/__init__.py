"""Search over strategies: measure what they ask for, let them propose, rank what fits."""

from snugfit.planner.calibration import PastRun, past_run
from snugfit.planner.search import infeasible_error, search

__all__ = ["PastRun", "infeasible_error", "past_run", "search"]
