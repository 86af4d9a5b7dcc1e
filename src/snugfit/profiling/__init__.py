"""Measure what the parts of a model need: bytes, seconds and multiply-accumulates."""

from snugfit.profiling.facts import unit_facts
from snugfit.profiling.own_loop import time_tensors
from snugfit.profiling.probe import LOOKING_BYTES, Probe, measure_probe, measure_probes, smallest_floor
from snugfit.profiling.tensors import TensorProbe, WholeStep

__all__ = [
    "LOOKING_BYTES",
    "Probe",
    "TensorProbe",
    "WholeStep",
    "measure_probe",
    "measure_probes",
    "smallest_floor",
    "time_tensors",
    "unit_facts",
]
