"""Learning rules without a backward pass through the network: DFA, DRTP and PEPITA, as pure functions.

Sources: Nokland, "Direct Feedback Alignment Provides Learning in Deep Neural Networks" (2016); Frenkel, Lefebvre and
Bol, "Learning Without Feedback: Fixed Random Learning Signals Allow for Feedforward Training of Deep Neural Networks"
(2021); Dellaferrera and Kreiman, "Error-driven Input Modulation: Solving the Credit Assignment Problem without a
Backward Pass" (2022). LLS (section 4.2, Table 2) compares with all three.

Shapes: B batch, K classes; hidden outputs and images are (B, *shape). The ``delta`` of a rule replaces a gradient of
the mean loss: an optimizer subtracts it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

MODULATION = 0.05
"""Scale of PEPITA's projection, from its authors' experiments."""


def output_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Error e of each sample, softmax minus one-hot target: (B, K), of logits (B, K) and labels (B,)."""
    return logits.softmax(1) - F.one_hot(labels, logits.shape[1])


def random_projection(
    classes: int,
    shape: tuple[int, ...],
    seed: int,
    *,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A fixed random matrix (K, *shape) from the classes to n elements, uniform with deviation ``scale * sqrt(2 / n)``.

    The same seed gives the same matrix; on the meta device nothing is drawn. ``scale`` is 1 for DFA and DRTP (He's
    initialisation, as in Frenkel's experiments) and :data:`MODULATION` for PEPITA.
    """
    if torch.device(device).type == "meta":
        return torch.empty((classes, *shape), dtype=dtype, device=device)
    bound = scale * math.sqrt(6 / math.prod(shape))
    generator = torch.Generator().manual_seed(seed)
    return torch.empty((classes, *shape), dtype=dtype).uniform_(-bound, bound, generator=generator).to(device)


def project(signal: Tensor, matrix: Tensor) -> Tensor:
    """Project a signal (B, K) by a matrix (K, *shape): (B, *shape)."""
    projected: Tensor = torch.tensordot(signal, matrix, dims=1)
    return projected


def dfa_delta(error: Tensor, matrix: Tensor) -> Tensor:
    """DFA: the output error projected to a hidden output, ``e B``, averaged over the batch.

    Error e (B, K), see :func:`output_error`, and matrix B (K, *shape) to (B, *shape), before the layer's own
    nonlinearity.
    """
    return project(error / len(error), matrix)


def drtp_delta(labels: Tensor, matrix: Tensor) -> Tensor:
    """DRTP: the target projected to a hidden output, ``-y* B``, averaged over the batch.

    The target replaces ``y* - y``, whose sign it has and which is minus e, so nothing beyond the layer is
    needed (Frenkel et al. 2021). Labels (B,) and matrix B (K, *shape) to (B, *shape), before the layer's own
    nonlinearity.
    """
    target = F.one_hot(labels, len(matrix)).to(matrix.dtype)
    return project(target / -len(labels), matrix)


def modulated(images: Tensor, error: Tensor, matrix: Tensor) -> Tensor:
    """PEPITA: the input of the second pass, ``x + F e`` (Dellaferrera and Kreiman, Algorithm 1).

    Images x (B, *shape), the error e (B, K) of the first pass and the matrix F (K, *shape).
    """
    return images + project(error, matrix)


def pepita_delta(first: Tensor, second: Tensor) -> Tensor:
    """PEPITA: the change of a layer's response from the first pass to the second, ``h - h_err``, averaged.

    With the layer's input in the second pass it makes the update ``(h_l - h_l^err) (h_(l-1)^err)^T``, which does not
    use the derivative of the nonlinearity. It is averaged over the batch and, for a convolution, over the positions of
    its feature map, as in the authors' convolutional experiments. The responses, (B, N) or (B, N, H, W) of N neurons,
    and the result have one shape.
    """
    return (first - second).div_(first.numel() / first.shape[1])
