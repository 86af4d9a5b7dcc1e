"""One script per claim; each runs snugfit as a user would, and writes what it measured to ``results/``."""
