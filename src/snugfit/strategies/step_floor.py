"""Tensor bytes of a training step on the meta device, counted in one pass over the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from snugfit._training.network import NetworkTrainer
from snugfit._training.optimizers import ParameterOptimizers
from snugfit._training.strategy import Trainable
from snugfit.memory.tensors import tensor_peak_bytes

MakeBatch = Callable[[], tuple[Tensor, Tensor]]
"""Makes inputs and labels (B, ...)."""


def run_step(trainer: NetworkTrainer, batch: MakeBatch, *, hold: bool) -> None:
    """One step of a whole network; with ``hold`` of two micro-batches, whose gradients are held."""
    for last in (False, True) if hold else (True,):
        trainer.step(*batch(), 0.5 if hold else 1.0, last)


def network_floor(trainer: NetworkTrainer, batch: MakeBatch, *, hold: bool) -> int:
    """Peak tensor bytes of a later step of a whole network on the meta device; see :func:`step_floor`."""
    if trainer.floor_in_one_pass:
        return step_floor(trainer, [trainer.optimizers], batch, hold=hold)
    return tensor_peak_bytes(lambda: run_step(trainer, batch, hold=hold), trainer.modules, repeats=2)


def step_floor(
    trainable: Trainable, optimizers: Iterable[ParameterOptimizers], batch: MakeBatch, *, hold: bool = False
) -> int:
    """Peak tensor bytes of a later step on the meta device.

    It begins with optimizer state; with ``hold`` it is the last micro-batch of two, with the gradients of the first.
    Neither is there for parameters that get no gradient, which the pass itself shows.
    """
    own = list(optimizers)
    arrived = [each.watch_gradients() for each in own]
    trained = [set(each.parameters) for each in own]

    def count() -> int:
        def prepare() -> None:
            for each, names in zip(own, trained, strict=True):
                each.make_state(names)
                if hold:
                    each.make_gradients(names)

        share = 0.5 if hold else 1.0
        return tensor_peak_bytes(lambda: trainable.step(*batch(), share, True), trainable.modules, prepare=prepare)

    peak = count()
    if arrived == trained:
        return peak
    trained = arrived
    return count()
