"""One run: its folder, budget, meter, subscribers, and position."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from snugfit._chain import UnitStore
from snugfit._core.budget import Budget
from snugfit._core.documents import DocumentError, converted
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Phase
from snugfit._core.profile import Profile
from snugfit._core.record import ExitRecord, KeptEpoch, PhaseRecord
from snugfit._core.run_memory import RunMemory
from snugfit._core.serial import from_data, to_data
from snugfit._core.workload import Workload
from snugfit._stopwatch import Stopwatch
from snugfit._storage.checkpoint import Checkpoint, CheckpointStore
from snugfit._storage.kept_weights import KeptWeights
from snugfit._storage.manifest import Manifest
from snugfit._storage.tensor_file import Deferred
from snugfit._training.events import Event, Notice, PhaseDone, PhaseStarted, Subscriber
from snugfit._training.finite import first_not_finite
from snugfit._training.launch import Commands
from snugfit._training.metrics import METRICS_FILE, MetricsWriter
from snugfit._training.optimizers import lr_factor
from snugfit._training.own_metrics import Values
from snugfit._training.own_parts import OwnParts, factor_of
from snugfit._training.stopping import StopFlag
from snugfit.errors import CheckpointError, DivergedError
from snugfit.memory import MemoryLimit, PeakMeter, release_memory, trim_heap
from snugfit.memory.freed_memory import OBSERVED_STEPS, SCALED_STEPS, FreedMemory, fillable_bytes

CHECKPOINT_SECONDS = 120.0
"""Longest time between two checkpoints within an epoch."""
TRIM_SECONDS = 0.5
"""Time between two trims of the heap, each of which takes a few milliseconds."""


POWERCAP = Path("/sys/class/powercap")
"""RAPL counters of energy, which Linux provides."""


@dataclass
class Position:
    """The position of a run, which a checkpoint stores with its tensors.

    Attributes:
        phase, epoch, step: the next step to run.
        loss_sum, correct, samples: sums of the current epoch so far.
        seconds: time spent in training before this position; ``phase_seconds`` of it in the current phase, which
            other processes made longer by ``phase_delay_seconds``, and ``data_seconds`` of it in waiting for batches of
            training steps.
        energy_joules: energy of the machine's processors before this position; 0 without a counter.
        phase_peak_bytes, phase_tensor_bytes: measured so far in the current phase.
        peak_bytes: measured so far in the run; ``total_bytes`` of all its processes, ``device_shares`` by kind.
        storage_bytes: most bytes of cache on disk so far; ``decoded_bytes`` those of decoded photos besides.
        phases, exits: records of finished phases and exits.
        kept: the epoch whose weights are kept, of those that were validated so far.
        improved: the last epoch whose validation accuracy was better than all before.
        overheads: seconds by kind.
        notes: small values of the strategy.
    """

    phase: int = 0
    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    samples: int = 0
    seconds: float = 0.0
    phase_seconds: float = 0.0
    phase_delay_seconds: float = 0.0
    data_seconds: float = 0.0
    energy_joules: float = 0.0
    phase_peak_bytes: int = 0
    phase_tensor_bytes: int = 0
    peak_bytes: int = 0
    total_bytes: int = 0
    device_shares: dict[str, int] = field(default_factory=dict)
    storage_bytes: int = 0
    decoded_bytes: int = 0
    metrics_offset: int = 0
    phases: list[PhaseRecord] = field(default_factory=list)
    exits: list[ExitRecord] = field(default_factory=list)
    kept: KeptEpoch | None = None
    improved: KeptEpoch | None = None
    overheads: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def start_epoch(self, epoch: int) -> None:
        """Move to the first step of an epoch."""
        self.epoch, self.step = epoch, 0
        self.loss_sum, self.correct, self.samples = 0.0, 0, 0


@dataclass(frozen=True)
class Job:
    """What a run does: the chosen candidate of a plan, its predicted cost, and what that was predicted from.

    ``memory`` is that of the processes at rest, the most of any process that planned or trained, if it was measured.
    ``own`` was passed from Python.
    """

    workload: Workload
    budget: Budget
    predicted: Cost
    profile: Profile
    memory: RunMemory | None = None
    own: OwnParts = field(default_factory=OwnParts)


@dataclass(frozen=True)
class Machine:
    """Where a run takes place: its meter measures memory above the baseline, its limit is in force."""

    hardware: Hardware
    device: torch.device
    meter: PeakMeter
    limit: MemoryLimit


class Run:
    """What a strategy's ``fit`` receives in addition to the chain and the data.

    ``weights`` holds every unit's weights by its index in the chain, ``exits`` every exit's classifier likewise.
    ``infinite_buffers`` names the buffers that hold infinity from the beginning.
    """

    def __init__(
        self,
        folder: Path,
        job: Job,
        machine: Machine,
        *,
        subscribers: Sequence[Subscriber] = (),
        stop: StopFlag | None = None,
        cache_dir: Path | None = None,
        commands: Commands | None = None,
    ) -> None:
        self.folder, self.workload, self.budget = folder, job.workload, job.budget
        self.predicted, self.profile, self.memory = job.predicted, job.profile, job.memory
        self.hardware, self.device = machine.hardware, machine.device
        self.meter, self.limit, self.enforced = machine.meter, machine.limit, machine.limit.enforced
        self.stop, self.commands, self.own = stop or StopFlag(), commands, job.own
        self.cache_dir = cache_dir or folder / "cache"
        self.manifest = Manifest.reopen(folder, self.cache_dir)
        self.weights = UnitStore(folder / "weights", self.manifest)
        self.exits = UnitStore(folder / "exits", self.manifest)
        self.checkpoints = CheckpointStore(folder / "checkpoint", self.manifest)
        self.kept_weights = KeptWeights(folder / "best", self.manifest)
        self.metrics = MetricsWriter(folder / METRICS_FILE, self.workload.metrics)
        self.position, self.own_values = Position(), Values()
        self.infinite_buffers: Collection[str] = ()
        self._subscribers: list[Subscriber] = [self.metrics, *subscribers]
        self._resumed: Checkpoint | None = None
        self.energy, self.freed = EnergyMeter(), FreedMemory(self.meter, self.limit)
        self._saved_at = self._trimmed_at = time.perf_counter()
        self._stopwatch = Stopwatch()
        self._stopwatch.start()

    def lr_factor(self, step: int, steps: int) -> float:
        """Share of the peak learning rate in a step, from 0, of all epochs with ``steps`` steps each."""
        settings, epochs = self.workload.optimizer, self.workload.epochs
        if self.own.schedule is not None:
            return factor_of(self.own.schedule, step, steps * epochs)
        return lr_factor(settings, step, steps, epochs)

    def emit(self, event: Event) -> None:
        """Send an event to every subscriber."""
        for subscriber in self._subscribers:
            subscriber(event)

    def resume(self) -> bool:
        """Continue from the newest checkpoint; False if there is none."""
        self._resumed = self.checkpoints.latest()
        self._stopwatch.start()
        self.energy.spent()
        if self._resumed is None:
            self.metrics.truncate(0)
            return False
        try:
            self.position = converted(partial(from_data, Position), self._resumed.position)
        except DocumentError as error:
            raise CheckpointError(f"the position in {self._resumed.folder} is damaged: {error}.") from error
        self.metrics.truncate(self._sound_metrics())
        return True

    def _sound_metrics(self) -> int:
        """Bytes of ``metrics.csv`` to continue from; none, with a notice, if the file was changed."""
        wanted, listed = self.position.metrics_offset, self.manifest.listed(METRICS_FILE)
        flaw = listed.flaw(self.metrics.path) if listed else None
        if not flaw and (listed is None or listed.bytes >= wanted):
            return wanted
        self.emit(Notice(f"{self.metrics.path} {flaw or 'was damaged'}; it starts again, and training continues"))
        return 0

    def count_decoded(self, size: int) -> None:
        """Count bytes of decoded photos on disk."""
        self.position.decoded_bytes = max(self.position.decoded_bytes, size)

    def count_storage(self, size: int) -> None:
        """Count bytes on disk at this moment; the record holds the most."""
        self.position.storage_bytes = max(self.position.storage_bytes, size)

    @property
    def resumed(self) -> bool:
        """Whether the current phase was resumed from a checkpoint in its middle."""
        return self._resumed is not None and self.position.epoch + self.position.step > 0

    def resumed_tensors(self, group: str, prefix: str = "") -> dict[str, torch.Tensor]:
        """Tensors, in their shapes, of one group of the checkpoint that this run was resumed from.

        With a ``prefix``, those whose names begin with it.

        Raises:
            CheckpointError: the run was not resumed, or its checkpoint lacks the group.
        """
        if self._resumed is None:
            raise CheckpointError(f"there is no checkpoint to load '{group}' from; start the run again.")
        return self._resumed.load(group, prefix)

    def save(self, tensors: Mapping[str, Mapping[str, torch.Tensor | Deferred]]) -> None:
        """Write a checkpoint of these tensors, of any shapes, and the current position.

        Raises:
            DivergedError: a tensor holds NaN or infinity: a gradient may, although the loss was finite. Buffers with
                infinity that the model was built with are no such tensors.
        """
        for group in tensors.values():
            if name := first_not_finite(group, self.infinite_buffers):
                raise self._diverged(f"{name} holds NaN or infinite values before")
        self.tick()
        self.position.metrics_offset = self.metrics.offset()
        kept = self.position.kept
        outdated = self.kept_weights.others(kept.epoch if kept else None)
        changed = {**self.metrics.written(), **dict.fromkeys(outdated)}
        self.checkpoints.save(tensors, to_data(self.position), changed)
        for path in outdated:
            path.unlink()
        self._saved_at = time.perf_counter()

    @property
    def save_due(self) -> bool:
        """Whether the last checkpoint is old enough for another one within the epoch."""
        return time.perf_counter() - self._saved_at > CHECKPOINT_SECONDS

    def tick(self) -> None:
        """Add the time since the last tick to the run and its phase, read the memory peak, and refresh the limit.

        The heap is trimmed at intervals, unless it keeps freed memory: reading images fragments it, which grew a run by
        4 MB in 500 steps.
        """
        self._stopwatch.lap()
        self.position.seconds += self._stopwatch.passed
        self.position.phase_seconds += self._stopwatch.passed
        if self.device.type == "cpu":
            self.position.phase_delay_seconds += self._stopwatch.delay
        self.position.energy_joules += self.energy.spent()
        peak = self.meter.mark()
        now = time.perf_counter()
        if now - self._trimmed_at > TRIM_SECONDS and not self.freed.keeps:
            trim_heap()
            self._trimmed_at = now
        self.limit.refresh()
        self._take_shares(peak)
        self.position.phase_peak_bytes = max(self.position.phase_peak_bytes, peak)
        self.position.peak_bytes = max(self.position.peak_bytes, peak)
        self.position.total_bytes = max(self.position.total_bytes, self.meter.total_bytes)

    def _take_shares(self, peak: int) -> None:
        """Keep the parts of the run's largest peak, which may come before it was resumed, and the most of the host."""
        before, now = self.position.device_shares, self.meter.shares
        if now:
            most = now if peak > self.position.peak_bytes or not before else before
            host = max(before.get("host_bytes", 0), now["host_bytes"])
            self.position.device_shares = {**most, "host_bytes": host}

    def start_phase(self, phase: Phase, index: int, count: int, epochs: int, steps: int, first_epoch: int = 0) -> None:
        """Begin or resume a phase whose weights are in memory; its first step may use all remaining headroom."""
        self.tick()
        release_memory()  # what loading the weights has left in the heap
        self.meter.restart()
        size, peak = phase.batch_size, phase.peak_bytes
        allowed = self._allowed_peak(phase)
        kept = phase.kept_bytes if allowed == fillable_bytes(peak) else 0
        scaled = self.workload.precision == "float16"
        self.freed.begin(allowed, kept, SCALED_STEPS if scaled else OBSERVED_STEPS)
        self.emit(PhaseStarted(phase.name, index, count, phase.units, size, epochs, steps, peak, first_epoch))

    def _allowed_peak(self, phase: Phase) -> int:
        """The peak up to which the heap may keep freed memory: beside it the limit has room for new kernels.

        A run may have less memory than was planned when it is resumed.
        """
        if self.device.type != "cpu":
            return 0
        budget = self.limit.budget_bytes
        most = phase.peak_bytes if budget is None else min(phase.peak_bytes, budget - self.limit.kernel_bytes)
        return fillable_bytes(most)

    def end_phase(self, phase: Phase, epochs: int, steps: int, cache_bytes: int = 0) -> None:
        """Record a finished phase and move the position to the start of the next."""
        self.tick()
        position = self.position
        position.phases.append(
            PhaseRecord(
                name=phase.name,
                units=phase.units,
                batch_size=phase.batch_size,
                predicted_peak_bytes=phase.peak_bytes,
                measured_peak_bytes=position.phase_peak_bytes,
                tensor_peak_bytes=position.phase_tensor_bytes,
                predicted_seconds=phase.seconds,
                seconds=position.phase_seconds,
                epochs=epochs,
                steps=steps,
                cache_bytes=cache_bytes,
                predicted_kept_bytes=phase.kept_bytes,
                delay_seconds=position.phase_delay_seconds,
            )
        )
        measured = position.phase_peak_bytes, position.phase_seconds
        self.emit(PhaseDone(phase.name, phase.peak_bytes, *measured, phase.kept_bytes))
        position.phase += 1
        position.start_epoch(0)
        position.phase_seconds = position.phase_delay_seconds = 0.0
        position.phase_peak_bytes = position.phase_tensor_bytes = 0
        self.freed.close()
        release_memory()  # what a device's allocator has reserved would count to the next phase
        self.meter.restart()

    def add_overhead(self, kind: str, seconds: float) -> None:
        """Record seconds outside training steps: profiling, caching, exit selection."""
        self.position.overheads[kind] = self.position.overheads.get(kind, 0.0) + seconds

    def require_finite(self, loss: float, where: str) -> None:
        """Raise DivergedError at the first loss that is NaN or infinite."""
        if not math.isfinite(loss):
            raise self._diverged(f"the loss became {loss} in {where},")

    def _diverged(self, what: str) -> DivergedError:
        wider = " --precision bfloat16 has a wider range." if self.workload.precision == "float16" else ""
        return DivergedError(
            f"{what} epoch {self.position.epoch + 1}, step {self.position.step + 1}. "
            f"Lower --lr in a new run, or check the data for broken images; what was saved is untouched.{wider}"
        )


class EnergyMeter:
    """Joules used by the processor's packages; of the whole machine, not of this process alone."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._counters = _readable(root)
        self._last = {path: _read(path) for path in self._counters}

    @property
    def counts(self) -> bool:
        """Whether there is a readable counter."""
        return bool(self._counters)

    def spent(self) -> float:
        """Joules since the last call, or since the meter was created; 0 without a counter."""
        total = 0
        for path, largest in self._counters.items():
            now = _read(path)
            total += (now - self._last[path]) % max(largest, 1)
            self._last[path] = now
        return total / 1e6


def _readable(root: Path) -> dict[Path, int]:
    """Counters of whole packages (``intel-rapl:0``, not its part ``intel-rapl:0:1``); each wraps to 0 at that value."""
    found = {}
    for zone in sorted(root.glob("intel-rapl:*")):
        if zone.name.count(":") > 1:
            continue
        try:
            _read(zone / "energy_uj")
            found[zone / "energy_uj"] = _read(zone / "max_energy_range_uj")
        except (OSError, ValueError):  # readable by root alone on many systems
            continue
    return found


def _read(path: Path) -> int:
    return int(path.read_text())
