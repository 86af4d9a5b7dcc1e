"""The loop and what it needs: optimizers, activation cache, checkpoints, events, seeds."""
