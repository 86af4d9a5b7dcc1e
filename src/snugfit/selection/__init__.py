"""Which tensors to train: time and memory of a selection, and the best selection within budgets.

>>> importance, t_dw, t_dy = [3.0, 1.0, 2.0], [0.02, 0.01, 0.01], [0.03, 0.01, 0.0]  # input first; seconds
>>> select(importance, t_dw, t_dy, budget_seconds=0.045)
array([ True, False,  True])
>>> backward_seconds([True, False, True], t_dw, t_dy)
0.04

:class:`TensorSelection` does it in a training loop; ``examples/own_loop_with_selection.py`` trains with it.
"""

from snugfit.selection.cost_model import ByteModel, backward_seconds, byte_model, least_seconds
from snugfit.selection.own_loop import TensorSelection
from snugfit.selection.pareto import BoundedSelection, Limits, solve_within
from snugfit.selection.solver import Selection, select, solve

__all__ = [
    "BoundedSelection",
    "ByteModel",
    "Limits",
    "Selection",
    "TensorSelection",
    "backward_seconds",
    "byte_model",
    "least_seconds",
    "select",
    "solve",
    "solve_within",
]
