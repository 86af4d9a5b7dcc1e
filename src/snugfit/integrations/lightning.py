"""A memory budget for Lightning: a callback that plans, enforces and reports.

It divides the batches of loaders, and sets ``accumulate_grad_batches`` accordingly; Lightning's loop stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from snugfit._engine.step_plan import LibraryStep
from snugfit.errors import UsageError, is_out_of_memory
from snugfit.integrations._batches import (
    DividedBatches,
    bytes_of,
    divided,
    example_of,
    first_of,
    first_tensor,
    images_of,
)
from snugfit.integrations._budget import LoopBudget, require
from snugfit.integrations._recomputation import recomputation_of

INSTALL = 'pip install "snugfit[lightning]"'
pl: Any = require("lightning.pytorch", INSTALL)
torchmetrics: Any = require("torchmetrics", INSTALL)

__all__ = ["MemoryBudget"]

COUNTING = ("accumulate_grad_batches", "limit_train_batches", "val_check_interval", "limit_val_batches")
"""Settings of a trainer that count batches, or are shares of them; they count micro-batches while it fits."""


class MemoryBudget(pl.Callback):
    """A callback that fits a training into a memory budget: ``Trainer(callbacks=[budget])``.

    When fitting starts, it measures training steps of the module with its own optimizers, which change nothing. Then it
    chooses into how many equal micro-batches each batch is divided, and which units of ``network`` are computed again
    in the backward pass. The system enforces the budget until fitting ends, and a line reports what was predicted,
    allowed and measured. The gradients are those of the whole batch, if the loss is a mean over images and no batch
    norm sees micro-batches. A last batch of fewer images than there are micro-batches counts less.

    The loaders may be given to ``fit``, or come from a data module or from the module itself. That for training must be
    one ``DataLoader``; if that for validation is one, none of its batches is larger than a micro-batch. Only one
    device, and automatic optimization, are supported.

    Args:
        memory: the budget, like ``"300MB"``.
        network: a part of the module that maps images (B, ...) to one tensor, to recompute; without one, nothing is
            recomputed.

    Attributes:
        budget: what is enforced and measured; ``budget.record`` holds the figures.
    """

    def __init__(self, memory: str | int, network: nn.Module | None = None) -> None:
        super().__init__()
        self.budget = LoopBudget(memory)
        self._network = network
        self._loaders: list[tuple[DataLoader[Any], DividedBatches]] = []
        self._recomputation: Any = None
        self._before: dict[str, Any] = {}
        self._frequencies: list[tuple[Any, int]] = []

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The same loader: those that ``fit`` is given are divided when it starts. Until 0.2 this was necessary."""
        return loader

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Plan, set Lightning's accumulation, and enforce the budget."""
        if not pl_module.automatic_optimization or trainer.world_size > 1:
            raise UsageError("MemoryBudget plans automatic optimization on one device; use snugfit.fit for a loop.")
        for name in ("overfit_batches", "reload_dataloaders_every_n_epochs"):
            if getattr(trainer, name):
                raise UsageError(f"MemoryBudget divides the batches of loaders that stay; leave {name} out.")
        self._loaders = list(_divided_loaders(trainer))
        loader, batches = self._loaders[0]
        plan = self.budget.plan(pl_module, lambda: self._step(trainer, pl_module, loader), batches.whole)
        for _, each in self._loaders:
            each.parts = -(-each.whole // plan.micro_batch)
        self._before = {name: getattr(trainer, name) for name in COUNTING}
        for name, value in self._before.items():
            if (count := self._whole_batches(name, value)) is not None:
                setattr(trainer, name, count * self._parts_of(name, plan.micro_batches))
        self._frequencies = [(each, each.frequency) for each in trainer.lr_scheduler_configs if each.interval == "step"]
        for each, frequency in self._frequencies:
            each.frequency = frequency * plan.micro_batches
        _forget_loaders(trainer)
        self._recomputation.use(plan.recomputation)
        self._first_step = trainer.global_step
        self.budget.start()

    def _whole_batches(self, setting: str, value: float | None) -> int | None:
        """Whole batches that a setting counts, itself or as a share of a loader; None if it is all of them or unset."""
        if not isinstance(value, float):
            return value
        loaders = self._loaders[1:] if setting == "limit_val_batches" else self._loaders[:1]
        if value == 1.0 or not loaders:
            return None
        batches = len(loaders[0][1].batches)
        if setting == "val_check_interval":  # a share of the batches that train
            limit = self._before["limit_train_batches"]
            batches = min(limit, batches) if isinstance(limit, int) else int(batches * limit)
        return int(batches * value)

    def _parts_of(self, setting: str, trained: int) -> int:
        """Parts of a batch that a setting counts: of training, or of the first loader of validation, if it is known."""
        if setting != "limit_val_batches":
            return trained
        return self._loaders[1][1].parts if self._loaders[1:] else 1

    def _step(self, trainer: Any, module: Any, loader: DataLoader[Any]) -> LibraryStep:
        batch = example_of(loader, self._loaders[0][1].whole, module.device)
        self._recomputation = recomputation_of(self._network, first_tensor(batch))

        def passes(images: int) -> None:
            with _logging_nothing(module):
                found = _training_step(trainer, module, first_of(batch, images))
                (found["loss"] if isinstance(found, dict) else found).backward()

        return LibraryStep(module, trainer.optimizers, passes, self._recomputation, bytes_of(batch))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Let the limit follow the memory that is mapped, and keep freed memory while the batch trains."""
        self.budget.begin(images_of(batch), trains=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read the peak, of a batch (B, ...)."""
        self.budget.end()
        self.budget.steps = trainer.global_step - self._first_step

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        """The same for validation."""
        self.budget.begin(images_of(batch))

    def on_validation_batch_end(self, *_: Any) -> None:
        """The same for validation."""
        self.budget.end()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Lift the limit, and report."""
        self._close(trainer)
        print(self.budget.record)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lift the limit; Lightning raises the error, with a note if memory was refused."""
        self._close(trainer)
        if is_out_of_memory(exception) and hasattr(exception, "add_note"):
            exception.add_note(self.budget.refused)

    def _close(self, trainer: Any) -> None:
        self.budget.close()
        for name, value in self._before.items():
            setattr(trainer, name, value)
        for each, frequency in self._frequencies:
            each.frequency = frequency
        for _, batches in self._loaders:
            batches.parts = 1
        _forget_loaders(trainer)
        if self._recomputation is not None:
            self._recomputation.use("")


def _divided_loaders(trainer: Any) -> Iterator[tuple[DataLoader[Any], DividedBatches]]:
    """Divide the loaders for training and validation, wherever Lightning has them from, for the fit that starts.

    Raises:
        UsageError: that for training is no ``DataLoader`` of a known batch size.
    """
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
        source = loop._data_source
        loader = source.dataloader() if source.is_defined() else None
        if isinstance(loader, DataLoader):
            source.instance, batches = divided(loader)
            yield loader, batches
        elif loop is trainer.fit_loop:
            raise UsageError(f"MemoryBudget divides the batches of one DataLoader, not of {type(loader).__name__}.")


def _training_step(trainer: Any, module: Any, batch: Any) -> Any:
    """What a module's step returns for a batch (B, ...), which passes the hooks that Lightning calls on its way."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module.on_before_batch_transfer(batch, 0)
    batch = trainer.strategy.batch_to_device(batch, module.device, 0)
    takes_index = len(inspect.signature(module.training_step).parameters) > 1
    return trainer.strategy.training_step(batch, *[0] * takes_index)


def _forget_loaders(trainer: Any) -> None:
    """Batches are counted again, which ``trainer.estimated_stepping_batches`` has counted before they were divided."""
    trainer.fit_loop._combined_loader = trainer.fit_loop.epoch_loop.val_loop._combined_loader = None


@contextmanager
def _logging_nothing(module: Any) -> Iterator[None]:
    """A module's ``log`` is not for trials, and metrics forget them."""
    module.log = lambda *_, **__: None
    try:
        yield
    finally:
        del module.log
        for each in module.modules():
            if isinstance(each, torchmetrics.Metric):
                each.reset()
