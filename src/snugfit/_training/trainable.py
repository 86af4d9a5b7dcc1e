"""What the training loop works on: something with a training step, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from torch import Tensor, nn

from snugfit._storage.tensor_file import Deferred
from snugfit._training.step import StepResult


class BatchSource(Protocol):
    """A split as batches: ``snugfit._data``'s ``Batches``, or cached activations."""

    def __len__(self) -> int:
        """Number of samples."""

    def steps(self, batch_size: int) -> int:
        """Training batches per epoch."""

    def epoch(self, epoch: int, batch_size: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches of one epoch, from ``start_step`` on; deterministic."""

    def in_order(self, batch_size: int, view: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, in order; of one augmented view, if asked for."""


class Trainable(Protocol):
    """Something with a training step: a network, or a block of units with local losses."""

    micro_batches: int
    """Batches that make one step; more than one when gradients are accumulated."""

    modules: list[nn.Module]
    """Everything that is in memory to be trained."""

    def step(self, inputs: Tensor, labels: Tensor, share: float, update: bool) -> StepResult:
        """Forward and backward on one (micro-)batch whose loss counts ``share``; then update, if asked to.

        The inputs may be empty afterwards: they are the step's, to be freed when they are read.
        """

    def set_lr_factor(self, factor: float) -> None:
        """Scale the peak learning rate."""

    def state(self) -> Mapping[str, Mapping[str, Tensor | Deferred]]:
        """Everything that training changes, by group; references, not copies. Averaged weights are made when saved."""

    def load_state(self, load: Callable[[str], dict[str, Tensor]]) -> None:
        """Take up a state, group by group."""

    def settle(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Put the weights to be evaluated in place, with BatchNorm statistics that belong to them."""
