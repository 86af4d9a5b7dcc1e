"""Runtime tensor selection."""

from snugfit.strategies.elastic.strategy import Elastic

__all__ = ["Elastic"]
