"""The protocols of training: a strategy, what it trains, and the batches that it trains on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Shortfall
from snugfit._core.profile import Profile
from snugfit._core.record import Record
from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import Deferred
from snugfit._training.run import Run
from snugfit._training.task import StepResult
from snugfit.profiling import Probe


class BatchSource(Protocol):
    """A split as batches: ``snugfit._data``'s ``Batches``, or activations; on the host or on the run's device."""

    def __len__(self) -> int:
        """Number of samples."""

    def steps(self, batch_size: int) -> int:
        """Training batches per epoch."""

    def epoch(
        self, epoch: int, batch_size: int, start_step: int = 0, parts: int = 1, mixed: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches (B, ...) of one epoch, from ``start_step`` on, each in nearly equal parts; deterministic.

        Without ``mixed``, no images are mixed by mixup or CutMix.
        """

    def in_order(self, batch_size: int, view: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, in order, as batches (B, ...); of one augmented view, if given."""

    def on_host(self) -> BatchSource:
        """The same batches in host memory."""


@dataclass(frozen=True)
class TrainingData:
    """Three disjoint splits as batches; no decision uses the test split.

    Attributes:
        train, val, test: batches; ``test`` is None if the data set has no such split.
        class_names: names of the classes, by label.
        others: training images of other data sets that options of strategies name, by option.
    """

    train: BatchSource
    val: BatchSource
    test: BatchSource | None
    class_names: tuple[str, ...]
    others: Mapping[str, BatchSource] = field(default_factory=dict)


class LoadTensors(Protocol):
    """Reads the tensors, of any shapes, of a group of a checkpoint."""

    def __call__(self, group: str, prefix: str = "", /) -> dict[str, Tensor]:
        """Read those of any shapes whose names begin with a prefix."""


class Trainable(Protocol):
    """Something with a training step: a network, or a block of units with local losses."""

    micro_batches: int
    """Batches per step; more than one if gradients are accumulated."""

    modules: list[nn.Module]
    """All modules in memory for training."""

    def step(self, inputs: Tensor, labels: Tensor, share: float, update: bool) -> StepResult:
        """Run forward and backward on a (micro-)batch (B, ...) whose loss counts ``share``; then update if asked to.

        The step may empty its inputs, to free them once they are read.
        """

    def set_lr_factor(self, factor: float) -> None:
        """Scale the peak learning rate."""

    def state(self) -> Mapping[str, Mapping[str, Tensor | Deferred]]:
        """Tensors that training changes, in their shapes, by group: not copies; averages are computed when saved.

        If the trainable is validated during training, the group ``model`` holds the weights and buffers.
        """

    def load_state(self, load: LoadTensors) -> None:
        """Restore a state, in the shapes of :meth:`state`, group by group.

        To use the weights of an earlier epoch after training, all groups but ``model`` are empty.
        """

    def settle(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Put the weights for evaluation in place, with their BatchNorm statistics; batches are (B, ...)."""


class Strategy(Protocol):
    """A way of training under a budget: a frozen dataclass whose instance is its configuration.

    Attributes:
        name: name in the registry.
        exact: whether its gradients are those of plain backpropagation; a property if that depends on the settings.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Every reason why it cannot serve this model, at once; empty when it can.

        Raises:
            ModelError: the model lacks what this strategy works on.
        """

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """What must be measured before it can propose anything."""

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Strategy]:
        """Filled-in instances that fit the budget, best first."""

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and which budget would be enough."""

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Predicted cost of this instance; pure."""

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
