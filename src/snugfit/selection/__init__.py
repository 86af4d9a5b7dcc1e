"""Which tensors to train: what a selection costs in time and bytes, and the best one within budgets."""

from snugfit.selection.solver import Selection, select, solve
from snugfit.selection.time_model import backward_seconds, least_seconds, passing_seconds

__all__ = [
    "Selection",
    "backward_seconds",
    "least_seconds",
    "passing_seconds",
    "select",
    "solve",
]
