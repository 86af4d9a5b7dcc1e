"""Search over strategies: measure what they ask for, let them propose, rank what fits."""

from snugfit._core.ranking import default_aim
from snugfit._planner.calibration import PastRun, corrected, past_run
from snugfit._planner.search import Considered, Measuring, Question, infeasible_error, search

__all__ = [
    "Considered",
    "Measuring",
    "PastRun",
    "Question",
    "corrected",
    "default_aim",
    "infeasible_error",
    "past_run",
    "search",
]
