"""Exact training in tiles, over time on one device or over several processes."""
