"""Recomputation schedules of a chain: what they cost, the fastest within a memory limit, and how they run."""
