"""Predictions and measurements of a run (its record), and of a trial."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from snugfit._core.serial import from_data, to_data
from snugfit._version import SCHEMA

PRECISIONS = {"map": "mAP", "map50": "mAP50"}
"""Measures of a model that does more than name one class, by their keys beside accuracies."""


@dataclass(frozen=True)
class PhaseRecord:
    """One finished phase of a plan: prediction and measurement. Peaks are memory above the baseline.

    Attributes:
        tensor_peak_bytes: peak bytes of live tensors in its first step.
        cache_bytes: bytes of activation cache written at its end.
        delay_seconds: those of its seconds that other processes added, because they had the cores.
        predicted_kept_bytes: what of the predicted peak is room for freed memory that the heap keeps for the next step.
    """

    name: str
    units: tuple[str, ...]
    batch_size: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    tensor_peak_bytes: int
    predicted_seconds: float
    seconds: float
    epochs: int
    steps: int
    cache_bytes: int = 0
    predicted_kept_bytes: int = 0
    delay_seconds: float = 0.0

    @property
    def exceeded(self) -> bool:
        """Whether the measured peak exceeded the prediction."""
        return self.measured_peak_bytes > self.predicted_peak_bytes


@dataclass(frozen=True)
class ExitRecord:
    """One exit: the model cut after the unit with this index in the chain, with that unit's own classifier."""

    unit: str
    index: int
    val_accuracy: float
    parameters: int


@dataclass(frozen=True)
class KeptEpoch:
    """The epoch (from 0) whose weights are kept, and its validation accuracy, mAP or mAP50, if it was measured."""

    epoch: int
    val_accuracy: float | None = None


@dataclass(frozen=True)
class IntervalRecord:
    """One selection of tensors, and the epochs that trained with it.

    Attributes:
        tensors: names of the tensors that trained, in order of execution.
        importance: importance by tensor name; empty if nothing was ranked.
        predicted_seconds, measured_seconds: step time, predicted and median of measured steps (0: none yet).
        full_seconds: measured step time of full training with torch's own operators.
        macs, full_macs: multiply-accumulates of a training step per image, of this selection and of full training.
        flops_per_epoch: floating-point operations of an epoch: two for each multiply-accumulate of every image.
        analytic_peak_bytes: bytes of tensors at the peak of a step, followed through the operators.
        profiled: whether operators were measured again before it, because step time had drifted.
        drifted: whether its step time drifted; the finding is stored and not repeated on resume.
    """

    first_epoch: int
    tensors: tuple[str, ...]
    predicted_seconds: float
    full_seconds: float
    macs: int
    full_macs: int
    predicted_peak_bytes: int
    epochs: int = 0
    measured_seconds: float = 0.0
    selection_seconds: float = 0.0
    importance: dict[str, float] = field(default_factory=dict)
    profiled: bool = False
    drifted: bool = False
    analytic_peak_bytes: int = 0
    flops_per_epoch: int = 0


@dataclass(frozen=True)
class Record:
    """The record of one run; the keys are those of ``snugfit train --json``.

    >>> import json, pathlib
    >>> record = Record.from_json(json.loads(pathlib.Path("runs/first/record.json").read_text()))
    >>> record.model, record.measured["peak_bytes"] <= record.predicted["peak_bytes"] <= record.budget["memory_bytes"]
    ('smallconv', True)

    Attributes:
        budget: ``memory_bytes``, ``total_memory_bytes`` (of all processes, those at rest included),
            ``host_memory_bytes`` (of the process beside a GPU), ``storage_bytes``, ``time_ratio``.
        enforced: whether the operating system or allocator enforced the memory budget.
        predicted: ``peak_bytes``, ``total_memory_bytes``, ``seconds``, ``storage_bytes``.
        measured: ``peak_bytes``, ``peak_metric``, ``total_memory_bytes`` (None if unknown), ``tensor_peak_bytes``,
            ``seconds``, ``data_seconds`` (in which training steps waited for their images), ``storage_bytes``,
            ``decoded_bytes`` (of photos on disk that were decoded once, within the storage budget but not predicted),
            ``energy_joules`` (None if no counter is readable), ``missed_phases``
            (names of the phases whose peak lies above their own prediction, even if that of the whole run holds),
            ``device_memory`` (``context_bytes``, ``reserved_bytes``, ``allocated_bytes`` and ``fragmentation_bytes`` of
            a GPU at the peak, and the most ``host_bytes``; None on the processor), ``loss_scale`` (in float16 the last
            ``scale``, and ``skipped_steps``; else None).
        accuracy: ``val``, ``test``, ``test_top5`` in [0, 1]; None without such a split. For several labels ``val`` and
            ``test`` are mAP, and for detection mAP50; ``map`` or ``map50`` is that of the test split, or else of
            validation.
        parameters: ``full`` and ``trained_model``.
        exit: ``unit``, ``index``, ``of``; None when the whole network was trained.
        kept: the epoch whose weights the model has, and which accuracies are measured with; None where each block keeps
            those of its last epoch.
        settings: settings of the strategy.
        phases: prediction against measurement per phase.
        exits: all measured exits, in chain order.
        intervals: selections of tensors, if the strategy makes any.
        tensors: names of all tensors that can be selected, in order of execution.
        profile: lines of the memory model, as data.
        overhead_seconds: ``profiling``, ``statistics`` (of BatchNorm), ``caching``, ``exit_selection``.
        confusion: test (or validation) confusion matrix, rows are true classes.
        class_names: names of the classes.
        metrics: ``val`` and ``test`` of metrics that were passed from Python, by name; None where not finite.
        workload, hardware: workload and machine, as data.
    """

    strategy: str
    model: str
    data: str
    device: str
    budget: dict[str, Any]
    enforced: bool
    predicted: dict[str, Any]
    measured: dict[str, Any]
    accuracy: dict[str, float | None]
    parameters: dict[str, int]
    exit: dict[str, Any] | None
    settings: dict[str, Any]
    run_dir: str
    schema: int = SCHEMA
    phases: tuple[PhaseRecord, ...] = ()
    exits: tuple[ExitRecord, ...] = ()
    kept: KeptEpoch | None = None
    intervals: tuple[IntervalRecord, ...] = ()
    tensors: tuple[str, ...] = ()
    profile: dict[str, Any] = field(default_factory=dict)
    overhead_seconds: dict[str, float] = field(default_factory=dict)
    confusion: list[list[int]] = field(default_factory=list)
    class_names: tuple[str, ...] = ()
    workload: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, float | None]] = field(default_factory=dict)

    @property
    def excess(self) -> tuple[int, int] | None:
        """Measured and allowed bytes of the process, or else of all, if the first are more: the run has failed."""
        of_host = (self.measured.get("device_memory") or {}).get("host_bytes")
        for measured, allowed in (
            (self.measured.get("peak_bytes"), "memory_bytes"),
            (self.measured.get("total_memory_bytes"), "total_memory_bytes"),
            (of_host, "host_memory_bytes"),
        ):
            peak, limit = measured or 0, self.budget.get(allowed)
            if limit is not None and peak > limit:
                return peak, limit
        return None

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, ``schema`` first."""
        data = to_data(self)
        return {"schema": data.pop("schema"), **data}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """Inverse of :meth:`to_json`; unknown keys are ignored."""
        return from_data(cls, data)


TRIAL_STEPS = 4
"""Default number of effective batches of a trial."""


@dataclass(frozen=True)
class Trial:
    """Predictions and measurements of a short run; None if it failed.

    Peaks are memory above the baseline. Seconds are those of its training phases, measured by the median step time.
    ``error`` says why it failed or exceeded its budget.
    """

    strategy: str
    images: int
    epochs: int
    budget_bytes: int | None
    predicted_peak_bytes: int
    predicted_seconds: float
    measured_peak_bytes: int | None = None
    measured_seconds: float | None = None
    error: str | None = None

    @property
    def seconds_ratio(self) -> float | None:
        """Measured over predicted seconds."""
        if self.measured_seconds is None or not self.predicted_seconds:
            return None
        return self.measured_seconds / self.predicted_seconds

    @property
    def peak_ratio(self) -> float | None:
        """Measured over predicted peak; above 1, the prediction was too low."""
        return None if self.measured_peak_bytes is None else self.measured_peak_bytes / self.predicted_peak_bytes

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, with the two ratios."""
        return {**to_data(self), "peak_ratio": self.peak_ratio, "seconds_ratio": self.seconds_ratio}
