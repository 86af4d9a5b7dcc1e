"""Plain backpropagation, the baseline."""
