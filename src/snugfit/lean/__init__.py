"""Memory-lean autograd operators that compute what torch's own do."""

from snugfit.lean.convolution import LeanConv2d, use_lean_convolutions
from snugfit.lean.ending import PooledEnding
from snugfit.lean.normalised import NormActivation
from snugfit.lean.pooling import average_pool

__all__ = ["LeanConv2d", "NormActivation", "PooledEnding", "average_pool", "use_lean_convolutions"]
