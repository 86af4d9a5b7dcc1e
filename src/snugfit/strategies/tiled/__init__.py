"""The strategy ``tiled``: a network's leading layers in tiles, over time on one device or over several processes."""

from snugfit.strategies.tiled.strategy import Tiled

__all__ = ["Tiled"]
