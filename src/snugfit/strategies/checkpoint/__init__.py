"""Backpropagation with recomputation: the optimal schedule, how it runs, and which one is taken."""
