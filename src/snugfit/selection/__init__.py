"""Which tensors to train: what a selection costs in time and bytes, and the best one within budgets."""

from snugfit.selection.byte_model import ByteModel, byte_model, selection_bytes
from snugfit.selection.own_loop import TensorSelection
from snugfit.selection.pareto import Bounded, select_within, solve_within
from snugfit.selection.solver import Selection, select, solve
from snugfit.selection.time_model import backward_seconds, least_seconds, passing_seconds

__all__ = [
    "Bounded",
    "ByteModel",
    "Selection",
    "TensorSelection",
    "backward_seconds",
    "byte_model",
    "least_seconds",
    "passing_seconds",
    "select",
    "select_within",
    "selection_bytes",
    "solve",
    "solve_within",
]
