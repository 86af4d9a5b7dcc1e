"""NeuroFlux: block-wise adaptive local learning."""

from snugfit.strategies.blockwise.strategy import Blockwise

__all__ = ["Blockwise"]
