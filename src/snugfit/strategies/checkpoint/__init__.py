"""Backpropagation with recomputation by the fastest schedule that fits the memory budget."""
