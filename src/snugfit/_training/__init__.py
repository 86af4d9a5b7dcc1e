"""The training loop and its parts: optimizers, activation cache, checkpoints, events, seeds."""
