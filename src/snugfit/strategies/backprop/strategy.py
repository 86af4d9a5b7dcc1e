"""Plain backpropagation at the largest batch, or micro-batch, that fits: the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any, ClassVar

from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Shortfall
from snugfit._core.profile import ProbeLine, Profile, UnitStats
from snugfit._core.workload import Workload
from snugfit._training.run import Run
from snugfit.memory.scratch import MappedScratch
from snugfit.profiling import Probe
from snugfit.strategies.backprop.config import WHOLE_BATCH, WHOLE_BATCH_PROBE
from snugfit.strategies.full_network import (
    PLAIN_PROBE,
    FullNetwork,
    MakeTrainer,
    batch_settings,
    by_own_loss,
    least_floor,
    network_shortfall,
    reasons_against_rounding,
    reasons_against_training,
)
from snugfit.strategies.micro_batch import BatchNormMode, line_name


@dataclass(frozen=True)
class Backprop(FullNetwork):
    """Backpropagation through the whole network.

    If the effective batch fits, every gradient is applied and freed in the backward pass. Otherwise micro-batches are
    accumulated to it. Accumulation holds all gradients; if they do not fit either, the effective batch is lowered, and
    the plan says so.

    With ``whole_batch`` batch norms normalise by all images of a step, and so do its gradients: a step takes the whole
    batch, in tiles of ``micro_batch`` images, whose feature maps take up to ``scratch_bytes`` per image on disk.
    """

    name: ClassVar[str] = "backprop"
    probe: ClassVar[str] = PLAIN_PROBE

    batch_norm: BatchNormMode = field(default="micro", kw_only=True)
    whole_batch: bool = False
    scratch_bytes: int = 0

    @property
    def in_tiles(self) -> bool:
        """Whether a step divides its batch into tiles of a micro-batch."""
        return self.whole_batch and self.micro_batches > 1

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients are held over micro-batches; not in tiles, whose step has one backward pass."""
        return self.micro_batches > 1 and not self.whole_batch

    def line(self, probe: str) -> str:
        """Key of a probe's line."""
        return WHOLE_BATCH_PROBE if self.in_tiles else super().line(probe)

    def seconds(self, line: ProbeLine) -> float:
        """Seconds of a micro-batch."""
        return line.seconds_at(self.micro_batch) / self.micro_batches if self.in_tiles else super().seconds(line)

    def make_trainer(self, units: Sequence[UnitStats]) -> MakeTrainer:
        """Trainers with the network's own loss and the chain's own forward pass."""
        return by_own_loss(lambda chain: chain.forward)

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why batch norms cannot work as asked, or weights cannot be rounded."""
        reasons = reasons_against_training(chain)
        reasons += _whole_batch().reasons_against(chain) if self._normalises_whole_batches(chain) else []
        return reasons + reasons_against_rounding(workload, chain)

    def prepared(self, workload: Workload, chain: Chain) -> Backprop:
        """With ``whole_batch`` and its storage, if batch norms are to normalise by all images of a step."""
        if not self._normalises_whole_batches(chain):
            return self
        return replace(self, whole_batch=True, scratch_bytes=_whole_batch().scratch_bytes_of(chain))

    def _normalises_whole_batches(self, chain: Chain) -> bool:
        return self.batch_norm == "exact" and self.accumulate and _has_batch_norms(chain)

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """The whole network's step, with gradients applied at once, and with gradients held or in tiles."""
        if not self.whole_batch:
            return super().probes(workload, chain, hardware)
        plain = replace(self, accumulate=False, whole_batch=False)
        return [*plain.probes(workload, chain, hardware), _whole_batch().whole_batch_probe(workload, chain, hardware)]

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Backprop]:
        """The whole batch, else micro-batches of it, else the largest batch that fits without them."""
        names = {PLAIN_PROBE: PLAIN_PROBE, line_name(PLAIN_PROBE, hold=True): line_name(PLAIN_PROBE, hold=True)}
        if self.whole_batch:
            names[line_name(PLAIN_PROBE, hold=True)] = WHOLE_BATCH_PROBE
        lines = {name: profile.lines[source] for name, source in names.items() if source in profile.lines}
        own = replace(profile, lines=lines)
        holds = not self.whole_batch
        micro = batch_settings(workload, own, budget, PLAIN_PROBE, accumulate=self.accumulate, holds=holds)
        if micro is not None:
            yield replace(self, **asdict(micro))

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured lines, and the storage of tiles."""
        cost = super().estimate(workload, profile, hardware)
        if not self.in_tiles or hardware.device != "cpu":
            return cost
        size = self.scratch_bytes * self.images(workload)
        phases = tuple(replace(phase, storage_bytes=size) for phase in cost.phases)
        return replace(cost, storage_bytes=size, phases=phases)

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and the smallest memory budget that would do."""
        floor = least_floor(profile, PLAIN_PROBE, WHOLE_BATCH_PROBE)
        return network_shortfall(profile, floor, budget, workload)

    def trainers_of(self, run: Run) -> MakeTrainer:
        """What makes the trainers of a run, whose scratch files lie in its cache folder."""
        make = super().trainers_of(run)
        if not self.whole_batch:
            return make
        limit, grown = run.budget.storage_bytes, run.count_storage
        files = MappedScratch(run.cache_dir, limit, grown, alternative="--batch-norm micro")
        steps = _whole_batch()
        made: MakeTrainer = steps.whole_batch_trainers(
            make, self.images(run.workload), steps.scratch_on(str(run.device), files)
        )
        return made

    @property
    def takes_whole_batches(self) -> bool:
        """Whether a step takes the whole batch."""
        return self.whole_batch


def _whole_batch() -> Any:
    """Steps on a whole batch, and with them all of :mod:`snugfit.tiling`, which others have no use for."""
    return import_module(WHOLE_BATCH)


def _has_batch_norms(chain: Chain) -> bool:
    """Whether a layer normalises by its batch in training."""
    return any(isinstance(layer, _BatchNorm) for unit in chain.all_units for layer in unit.module.modules())
