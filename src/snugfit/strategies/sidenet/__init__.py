"""The strategy ``sidenet``: transfer learning with a frozen, pruned backbone and a small network beside it."""

from snugfit.strategies.sidenet.strategy import Sidenet

__all__ = ["Sidenet"]
