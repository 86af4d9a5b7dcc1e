"""Learning without backpropagation through the network: DFA, DRTP and PEPITA, to compare with."""

from snugfit.strategies.feedback.strategy import Feedback

__all__ = ["Feedback"]
