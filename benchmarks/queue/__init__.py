"""Long experiments: a short run of everything before a longer one of anything; ``python -m benchmarks.queue``."""
