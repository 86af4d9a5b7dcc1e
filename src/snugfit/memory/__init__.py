"""Memory as the operating system counts it: measure it, limit it, predict it.

>>> import torch
>>> cpu = torch.device("cpu")
>>> baseline = prepare_process()  # budgets and peaks count from here
>>> meter = make_meter(baseline, cpu)
>>> with MemoryLimit(20_000_000, baseline, cpu) as limit:
...     try:
...         tensor = torch.ones(50_000_000)
...     except RuntimeError as error:
...         print(is_out_of_memory(error), meter.mark() < 20_000_000)
True True

``examples/own_loop_with_memory.py`` trains with it.
"""

from snugfit._upstream import fix_group_norm
from snugfit.errors import is_out_of_memory
from snugfit.memory.heap import trim_heap
from snugfit.memory.limit import MemoryLimit
from snugfit.memory.line_fit import fit_line
from snugfit.memory.meter import PeakMeter, make_meter
from snugfit.memory.process import Baseline, MemoryStatus, prepare_process, read_status, release_memory
from snugfit.memory.scratch import MappedScratch
from snugfit.memory.tensors import saved_bytes, tensor_peak_bytes

fix_group_norm()

__all__ = [
    "Baseline",
    "MappedScratch",
    "MemoryLimit",
    "MemoryStatus",
    "PeakMeter",
    "fit_line",
    "is_out_of_memory",
    "make_meter",
    "prepare_process",
    "read_status",
    "release_memory",
    "saved_bytes",
    "tensor_peak_bytes",
    "trim_heap",
]
