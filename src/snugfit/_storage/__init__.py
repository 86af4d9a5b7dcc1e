"""Tensors and weights on disk: one writer and one reader of each kind of file."""
