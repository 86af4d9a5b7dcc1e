"""The inputs of the training loop: something with a training step, and its batches."""

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
        """Shuffled batches (B, ...) of one epoch, from ``start_step`` on; deterministic."""

    def in_order(self, batch_size: int, view: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, in order, as batches (B, ...); of one augmented view, if given."""


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
        """All tensors that training changes, in their shapes, by group.

        Not copies. Averages are computed when saved.
        """

    def load_state(self, load: Callable[[str], dict[str, Tensor]]) -> None:
        """Restore a state, in the shapes of :meth:`state`, group by group."""

    def settle(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Put the weights for evaluation in place, with their BatchNorm statistics; batches are (B, ...)."""
