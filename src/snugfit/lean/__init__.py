"""Memory-lean autograd operators that compute what torch's own do."""

from snugfit.lean.convolution import LeanConv2d, use_lean_convolutions

__all__ = ["LeanConv2d", "use_lean_convolutions"]
