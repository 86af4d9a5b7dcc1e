"""A memory budget for the Trainer of transformers: a callback that plans, enforces and reports.

It sets the arguments ``per_device_train_batch_size``, ``gradient_accumulation_steps`` and ``activation_checkpointing``;
the Trainer's loop stays as it is.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from snugfit._engine.step_plan import LibraryStep
from snugfit.errors import UsageError
from snugfit.integrations._batches import bytes_of, example_of, first_of
from snugfit.integrations._budget import LoopBudget, require

INSTALL = 'pip install "snugfit[huggingface]"'
transformers: Any = require("transformers", INSTALL)
require("accelerate", INSTALL)

__all__ = ["MemoryBudget"]

CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")  # the former name, until transformers 6
    if hasattr(transformers.PreTrainedModel, f"{name}_enable")
)


class MemoryBudget(transformers.TrainerCallback):
    """A callback that fits a training into a memory budget: ``trainer.add_callback(MemoryBudget(trainer, "2GB"))``.

    When it is made, it measures training steps of the model with the trainer's optimizer, which change nothing. Then it
    sets the trainer's arguments: equal micro-batches that add up to the batch that they described, activation
    checkpointing if a model supports it and the micro-batches alone would not do or would be slower, and evaluation in
    batches no larger than a micro-batch. The system enforces the budget while the trainer trains, and a line reports
    what was predicted, allowed and measured.

    Trainers tell callbacks of no exception: after one, call :meth:`close`, or train inside ``with budget:``, so that
    the limit is lifted. Only one device is supported. What evaluation gathers (all logits) is not planned:
    set ``eval_accumulation_steps`` or ``prediction_loss_only``.

    Args:
        trainer: with its model, data and arguments.
        memory: the budget, like ``"2GB"``.

    Attributes:
        budget: what is enforced and measured; ``budget.record`` holds the figures.

    Raises:
        UsageError: the trainer runs on several devices.
        InfeasibleBudgetError: no micro-batch fits the budget.
    """

    def __init__(self, trainer: Any, memory: str | int) -> None:
        arguments = trainer.args
        if arguments.world_size > 1 or arguments.n_gpu > 1 or arguments.auto_find_batch_size:
            raise UsageError("MemoryBudget plans for one device, and without auto_find_batch_size, which it replaces.")
        self.budget = LoopBudget(memory)
        whole = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        plan = self.budget.plan(trainer.model, lambda: _step(trainer, whole), whole)
        if arguments.dataloader_drop_last and plan.micro_batches > 1:
            raise UsageError(
                "dataloader_drop_last drops part of a micro-batch where batches are divided; leave it out, and the "
                "images of the last batch out of the data."
            )
        arguments.per_device_train_batch_size = trainer._train_batch_size = plan.micro_batch
        arguments.gradient_accumulation_steps = plan.micro_batches
        arguments.per_device_eval_batch_size = min(arguments.per_device_eval_batch_size, plan.micro_batch)
        if plan.recomputation:
            setattr(arguments, CHECKPOINTING, True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Enforce the budget."""
        self._first_step = state.global_step
        self.budget.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the limit follow the memory that is mapped; the Trainer does not tell how many images are next."""
        self.budget.begin(None, trains=True)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The same for each micro-batch."""
        self.budget.begin(None, trains=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the peak; evaluation may be next."""
        self.budget.begin(None)
        self.budget.steps = state.global_step - self._first_step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Lift the limit, and report."""
        self.budget.close()
        print(self.budget.record)

    def close(self) -> None:
        """Lift the limit after an exception; does nothing otherwise."""
        self.budget.close()

    def __enter__(self) -> MemoryBudget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _step(trainer: Any, whole: int) -> LibraryStep:
    before = trainer.optimizer
    optimizer = before or trainer.create_optimizer()
    trainer.optimizer = before  # one that trains is made when training begins
    batch = example_of(trainer.get_train_dataloader(), whole, trainer.args.device)
    trainer.model.train()

    def passes(images: int) -> None:
        with trainer.accelerator.autocast():
            loss = trainer.compute_loss(trainer.model, first_of(batch, images))
        loss.backward()

    recomputation = Checkpointing(trainer.model, enabled=bool(getattr(trainer.args, CHECKPOINTING)))
    return LibraryStep(trainer.model, [optimizer], passes, recomputation, bytes_of(batch))


class Checkpointing:
    """Activation checkpointing of a model of transformers, if it supports it and it is not enabled anyway."""

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self._model: Any = model
        supported = getattr(model, "supports_gradient_checkpointing", False) and not enabled
        self.schedules = ("activation checkpointing",) if supported else ()

    def use(self, schedule: str) -> None:
        """Switch it on, or off if the schedule is empty."""
        if schedule:
            getattr(self._model, f"{CHECKPOINTING}_enable")()
        elif self.schedules:
            getattr(self._model, f"{CHECKPOINTING}_disable")()
