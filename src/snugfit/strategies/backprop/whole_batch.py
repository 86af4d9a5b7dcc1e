"""Steps on a whole batch whose micro-batches share the statistics of batch norms (``--batch-norm exact``).

A step runs in tiles of a micro-batch of images (:mod:`snugfit.tiling.sequential`). What norms read is kept for the
whole batch, on a CPU in scratch files; everything between two norms is computed again in the backward pass.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor, fx, nn

from snugfit._chain import Chain
from snugfit._core.hardware import Hardware
from snugfit._core.parts import largest_parts
from snugfit._core.workload import Workload
from snugfit._training.network import NetworkTrainer
from snugfit._training.task import StepResult
from snugfit.errors import ModelError
from snugfit.memory.scratch import MappedScratch
from snugfit.profiling import Probe
from snugfit.strategies.backprop.config import FLAG, WHOLE_BATCH_PROBE
from snugfit.strategies.full_network import PLAIN_PROBE, MakeTrainer, may_not_fit, network_probe
from snugfit.strategies.memory_estimates import synthetic_batch
from snugfit.strategies.tiled_training import OneDeviceTrainer
from snugfit.tiling.candidates import scratch_bytes
from snugfit.tiling.grouping import named_profile
from snugfit.tiling.tileable_prefix import find_tileable_prefix

GROUPS = "one"
"""Groups of layers end at batch norms alone."""


def reasons_against(chain: Chain) -> list[str]:
    """Why batch norms cannot normalise by the whole batch of several micro-batches."""
    reasons = [f"{FLAG}: {reason}" for reason in chain.reasons_against_units()]
    if chain.undivided or chain.inputs:
        return reasons
    try:
        find_tileable_prefix(_traced(chain), chain.input_shape)
    except ModelError as error:
        reasons.append(f"{FLAG}: {str(error).rstrip('.')}")
    return reasons


def scratch_bytes_of(chain: Chain) -> int:
    """Most bytes of scratch files per image of a whole batch."""
    layers = find_tileable_prefix(_traced(chain), chain.input_shape).layers
    return scratch_bytes(layers, named_profile(GROUPS, layers.cuts))


def _traced(chain: Chain) -> fx.GraphModule:
    return cast(fx.GraphModule, copy.deepcopy(chain).to_module()).train()


def whole_batch_trainers(make_plain: MakeTrainer, batch: int, scratch: MappedScratch | None) -> MakeTrainer:
    """Factory of trainers on whole batches of ``batch`` images, which they divide into the given number of parts.

    With one part it is ``make_plain``.
    """

    def make(chain: Chain, module: nn.Module, workload: Workload, parts: int) -> NetworkTrainer:
        if parts == 1:
            return make_plain(chain, module, workload, 1)
        trainer = OneDeviceTrainer(chain, module, workload, 1, (1, 1), GROUPS, scratch)
        trainer.forward.images = -(-batch // parts)
        return trainer

    return make


class _WholeBatchProbe(OneDeviceTrainer):
    """A step takes a tile's images, and runs on a synthetic batch of ``whole`` images in tiles of as many."""

    whole: int

    def step(self, inputs: Tensor, labels: Tensor, share: float = 1.0, update: bool = True) -> StepResult:
        """Run a step; inputs (b, C, H, W) and labels (b, ...) give the size of a tile and the device."""
        self.forward.images = len(inputs)
        shape, device = tuple(inputs.shape[1:]), str(inputs.device)
        del inputs, labels
        return super().step(*synthetic_batch(self.task, shape, self.whole, device), share, update)


def whole_batch_probe(workload: Workload, chain: Chain, hardware: Hardware) -> Probe:
    """The probe of a step on the effective batch; measured only if that batch does not fit without micro-batches."""
    scratch = scratch_on(hardware.device, MappedScratch(Path(tempfile.gettempdir())))

    def make(chain: Chain, module: nn.Module, workload: Workload, parts: int) -> NetworkTrainer:
        trainer = _WholeBatchProbe(chain, module, workload, parts, (1, 1), GROUPS, scratch)
        trainer.whole = workload.effective_batch
        return trainer

    probe = network_probe(WHOLE_BATCH_PROBE, chain, workload, hardware.device, make, hold=False, heap="steps")
    limit = workload.effective_batch
    return replace(probe, sizes=largest_parts(limit), needed=partial(may_not_fit, PLAIN_PROBE, limit))


def scratch_on(device: str, scratch: MappedScratch) -> MappedScratch | None:
    """Scratch files on a CPU; none elsewhere, where feature maps stay in the device's memory."""
    return scratch if device == "cpu" else None
