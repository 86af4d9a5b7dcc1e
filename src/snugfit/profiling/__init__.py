"""Measurement of a model's parts: bytes, seconds and multiply-accumulates.

>>> from torch import fx, nn
>>> from snugfit.profiling import analytic_activation_memory
>>> network = fx.symbolic_trace(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)))
>>> memory = analytic_activation_memory(network, (1, 8, 8), {"3.weight", "3.bias"}, batch=4)
>>> memory.peak_bytes  # of an image's activations, in the block that needs most
1408

``examples/own_loop_with_selection.py`` times the tensors of a network with it.
"""

from typing import TYPE_CHECKING

from snugfit._core.late_names import late_names
from snugfit.profiling.description import describe, unit_stats
from snugfit.profiling.measurement_cache import Measurements
from snugfit.profiling.measuring import alone, in_fresh_process, in_next_process, measure_probes, without_others
from snugfit.profiling.probe import META_PASS_BYTES, Probe, measure_probe, smallest_floor

if TYPE_CHECKING:
    from snugfit.profiling.activation import analytic_activation_memory
    from snugfit.profiling.own_loop import time_tensors
    from snugfit.profiling.tensors import TensorProbe, WholeStep

_LATE = {
    "snugfit.profiling.activation": ("analytic_activation_memory",),
    "snugfit.profiling.own_loop": ("time_tensors",),
    "snugfit.profiling.tensors": ("TensorProbe", "WholeStep"),
}
"""Names that few strategies need, by module: 1 MB."""

__all__ = [
    "META_PASS_BYTES",
    "Measurements",
    "Probe",
    "TensorProbe",
    "WholeStep",
    "alone",
    "analytic_activation_memory",
    "describe",
    "in_fresh_process",
    "in_next_process",
    "measure_probe",
    "measure_probes",
    "smallest_floor",
    "time_tensors",
    "unit_stats",
    "without_others",
]

__getattr__ = late_names(__name__, _LATE)
