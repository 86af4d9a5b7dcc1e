"""A memory budget for ultralytics: callbacks that plan, enforce and report.

They set the trainer's ``batch``, as its own answer to refused memory does; it accumulates to ``nbs`` images as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any

import torch

from snugfit._core.known import keeping_torch
from snugfit._engine.step_plan import LibraryStep, States
from snugfit.errors import UsageError
from snugfit.integrations._batches import bytes_of, example_of, first_of, images_of
from snugfit.integrations._budget import LoopBudget, require
from snugfit.integrations._recomputation import recomputation_of
from snugfit.memory import tensor_peak_bytes

INSTALL = keeping_torch('pip install "snugfit[ultralytics]"')
torch_utils: Any = require("ultralytics.utils.torch_utils", INSTALL)
with contextlib.suppress(ImportError):  # checkpoints use polars, whose threads try without end if refused memory
    import_module("polars").read_csv(b"column\n1\n")
for _name, _enabled in require("ultralytics.utils", INSTALL).SETTINGS.items():
    if _enabled is True:  # experiment trackers, which the trainer imports when it begins; Ray takes 53 MB
        with contextlib.suppress(ImportError):
            import_module(f"ultralytics.utils.callbacks.{'wb' if _name == 'wandb' else _name}")

__all__ = ["MemoryBudget"]

BOXES = ("batch_idx", "cls", "bboxes")
"""Tensors of a batch with boxes that have a row per box; ``batch_idx`` (N,) is the image of each."""


class MemoryBudget:
    """Fits the training of an ultralytics model into a memory budget: ``MemoryBudget(model, "2GB")``, then train.

    It adds callbacks to the model. When the trainer has made network, optimizer and loaders, training steps are
    measured, which change nothing, and the largest ``batch`` that fits and divides the given one is set. The trainer
    then accumulates ``nbs / batch`` batches, as it does for any small batch. The system enforces the budget until
    training has ended, and a line reports what was predicted, allowed and measured.

    Only one device is supported. Nothing is recomputed, because the network's forward pass returns a loss.

    Args:
        model: a model of ultralytics that classifies or detects.
        memory: the budget, like ``"2GB"``.

    Attributes:
        budget: what is enforced and measured; ``budget.record`` holds the figures.
    """

    def __init__(self, model: Any, memory: str | int) -> None:
        self.budget = LoopBudget(memory)
        events: dict[str, Callable[[Any], None]] = {
            "on_pretrain_routine_end": self._plan,
            "on_train_batch_start": lambda _: self.budget.begin(None, trains=True),
            "on_train_batch_end": self._end,
            "on_val_batch_start": self._begin,
            "on_val_batch_end": self._end,
            "on_fit_epoch_end": self._end,
            "on_train_end": self._report,
            "teardown": lambda _: self.budget.close(),  # after errors, too
        }
        for event, callback in events.items():
            model.add_callback(event, callback)

    def _plan(self, trainer: Any) -> None:
        """Choose the batch, rebuild the loaders, and enforce the budget."""
        whole, nominal = trainer.batch_size, trainer.args.nbs
        if trainer.world_size > 1 or trainer.args.compile or trainer.args.task not in ("classify", "detect"):
            raise UsageError("MemoryBudget plans classification and detection on one device, without compile=.")
        if getattr(trainer.args, "multi_scale", 0):
            raise UsageError("multi_scale= draws the size of images, so the largest step is unknown: leave it out.")
        if whole > nominal:
            raise UsageError(f"batch={whole} is above nbs={nominal}, to which batches add up; give nbs={whole}, too.")
        plan = self.budget.plan(trainer.model, lambda: _step(trainer, whole), whole)
        if plan.micro_batch != whole:  # as the trainer does after refused memory
            trainer.args.batch = trainer.batch_size = plan.micro_batch
            trainer._build_train_pipeline()
            trainer.validator.dataloader = trainer.test_loader
        self.budget.start()
        trainer.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.budget.steps += 1

    def _begin(self, _: Any) -> None:
        """Let the limit follow the memory that is mapped; the trainer does not tell how many images are next."""
        self.budget.begin(None)

    def _end(self, _: Any) -> None:
        """Read the peak, and let the limit follow; what comes between batches, such as checkpoints, has no kernels.

        Nothing stays open, because validation runs in an inference mode, which what is opened outside must not leave.
        """
        if self.budget.loop_plan is not None:
            self.budget.begin(self.budget.loop_plan.micro_batch)

    def _report(self, _: Any) -> None:
        self.budget.close()
        print(self.budget.record)


def _step(trainer: Any, whole: int) -> LibraryStep:
    """Forward and backward passes as the trainer runs them, over the images with the most boxes."""
    batch = trainer.preprocess_batch(example_of(trainer.train_loader, whole, trainer.device, most_boxes_first))
    trainer.model.train()

    def passes(images: int) -> None:
        with torch.autocast(trainer.device.type, enabled=bool(trainer.amp)):
            loss, _ = trainer.model(_first(batch, images))
        loss.sum().backward()

    recomputation = recomputation_of(None, batch["img"])
    held = 2 * bytes_of(batch)  # the trainer keeps the batch before while the next one is collated
    return LibraryStep(trainer.model, [trainer.optimizer], passes, recomputation, held, BetweenSteps(trainer))


class BetweenSteps:
    """Bytes that the trainer allocates between two steps: for validation, a checkpoint, or the last evaluation.

    Called with images at once and the optimizer's states.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._average = trainer, trainer.ema.ema
        tensors = [*self._average.parameters(), *self._average.buffers()]
        self._weights: int = sum(each.nbytes for each in tensors)
        self._half: int = sum(2 * each.numel() if each.is_floating_point() else each.nbytes for each in tensors)

    def __call__(self, images: int, states: States) -> int:
        return self._gradients(images) + max(self._checkpoint(states), self._last_evaluation(images))

    def _gradients(self, images: int) -> int:
        """Those of an epoch's last images, which wait for the next epoch unless every batch is a step."""
        if images == self._trainer.args.nbs:
            return 0
        return sum(int(each.nbytes) for each in self._trainer.model.parameters() if each.requires_grad)

    def _checkpoint(self, states: States) -> int:
        """Copies of the average and the states as they are stored, and a file of both, whose buffer is 1/8 larger."""
        stored = torch_utils.convert_optimizer_state_dict_to_fp16({"state": dict(enumerate(map(dict, states)))})
        copies = self._half + bytes_of(list(stored["state"].values()))
        return 2 * copies + copies // 8

    def _last_evaluation(self, images: int) -> int:
        """The last checkpoint's weights, those of the best in 32 bits, and a batch, which is of twice as many images.

        Validation needs the batch alone.
        """
        count = min(2 * images, len(self._trainer.test_loader.dataset))
        return self._half + self._weights + count * self._bytes_per_image

    @cached_property
    def _bytes_per_image(self) -> int:
        """Peak of tensors in a forward pass over an image of validation, which is as large as its largest."""
        dataset = self._trainer.test_loader.dataset
        channels, *sides = dataset[0]["img"].shape
        shapes = getattr(dataset, "batch_shapes", None)
        sides = sides if shapes is None else shapes.max(0)
        image = torch.zeros(1, channels, *map(int, sides), device=self._trainer.device)
        with torch.no_grad():
            return tensor_peak_bytes(lambda: self._average(image), [image])


def most_boxes_first(dataset: Any) -> list[int]:
    """Indices of the images of a data set, those with the most boxes first; without boxes all as they are.

    The loss pads the boxes of all images to those of the image with the most.
    """
    labels = getattr(dataset, "labels", None)
    indices = range(len(dataset))
    return [*indices] if labels is None else sorted(indices, key=lambda index: -len(labels[index]["cls"]))


def _first(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """The first images (count, C, H, W) of a batch, with their classes or boxes."""
    if "batch_idx" not in batch or count == images_of(batch["img"]):
        return dict(first_of(batch, count))
    rows = batch["batch_idx"] < count
    boxes = {key: batch[key][rows] for key in BOXES if key in batch}
    return {**first_of({key: value for key, value in batch.items() if key not in BOXES}, count), **boxes}
