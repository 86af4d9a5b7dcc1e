"""Backpropagation with recomputation: the optimal schedule (programme), how it runs (forward), which one is taken."""

from snugfit.strategies.checkpoint.forward import recomputing_forward
from snugfit.strategies.checkpoint.schedule import Schedule
from snugfit.strategies.checkpoint.strategy import Checkpoint

__all__ = ["Checkpoint", "Schedule", "recomputing_forward"]
