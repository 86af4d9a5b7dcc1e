"""Parts of a training step that every trainable uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from snugfit._training.task import Task
from snugfit.memory.autocast import autocast


@dataclass(frozen=True)
class StepResult:
    """Mean loss over the batch, and its number of correct samples; None if single samples do not determine it."""

    loss: float
    correct: int | None

    @classmethod
    def of(cls, loss: Tensor, logits: Tensor, labels: Tensor) -> StepResult:
        """Read loss (scalar), logits (B, classes) and labels (B,); on the meta device there is nothing to read."""
        if loss.is_meta:
            return cls(0.0, 0)
        return cls(loss.item(), int((logits.detach().argmax(1) == labels).sum()))

    @classmethod
    def of_task(cls, task: Task, loss: Tensor, outputs: Tensor, targets: Tensor) -> StepResult:
        """Read loss (scalar), outputs and targets of a task; on the meta device there is nothing to read."""
        return cls(0.0, 0) if loss.is_meta else cls(loss.item(), task.correct(outputs, targets))


def precision_context(inputs: Tensor, *, bfloat16: bool) -> AbstractContextManager[object]:
    """Autocast to bfloat16 on the device of inputs (B, ...), if requested."""
    return autocast(inputs.device.type) if bfloat16 else nullcontext()


def loss_of(
    task: Task, forward: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor, *, bfloat16: bool
) -> tuple[Tensor, Tensor]:
    """A task's loss (scalar) and the outputs that ``forward`` makes of inputs (B, ...) with these targets."""
    with precision_context(inputs, bfloat16=bfloat16):
        outputs = forward(inputs)
        return task.loss(outputs, targets), outputs


def cross_entropy_of(
    forward: Callable[[Tensor], Tensor], inputs: Tensor, labels: Tensor, *, bfloat16: bool
) -> tuple[Tensor, Tensor]:
    """Mean cross entropy (scalar) and the logits (B, K) that ``forward`` makes of inputs (B, ...) with labels (B,)."""
    with precision_context(inputs, bfloat16=bfloat16):
        logits = forward(inputs)
        return F.cross_entropy(logits, labels), logits
