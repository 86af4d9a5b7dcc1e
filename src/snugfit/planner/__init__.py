"""Search over strategies: measure what they ask for, let them propose, rank what fits."""

from snugfit.planner.search import infeasible_error, search

__all__ = ["infeasible_error", "search"]
