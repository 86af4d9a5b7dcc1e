"""The selections that never change: the baselines of ElasticTrainer's section 8."""

from __future__ import annotations

import numpy as np

from snugfit.selection.network import Mask, Network
from snugfit.strategies.elastic.config import ElasticScheme as Scheme


def scheme_mask(scheme: Scheme, network: Network) -> Mask:
    """The tensors that a baseline trains, (N,) bool.

    ``full`` and ``prunetrain`` train everything, ``head`` the classifier (traditional transfer learning), ``bn+bias``
    all tensors of norms, every bias, and the classifier.
    """
    if scheme == "head":
        return network.head
    if scheme == "bn+bias":
        norms = np.array(["norm" in network.operators[place].kind.lower() for place in network.place])
        biases = np.array([name.endswith("bias") for name in network.names])
        return np.asarray(norms | biases | network.head)
    return np.ones(len(network.names), dtype=bool)
