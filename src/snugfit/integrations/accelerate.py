"""A memory budget for loops with accelerate: a context that plans, enforces and reports.

It divides the batches of a loader, and sets ``accelerator.gradient_accumulation_steps``; the loop stays yours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from snugfit._chain.propagation import in_mode
from snugfit._engine.step_plan import LibraryStep
from snugfit.errors import BudgetExceededError, UsageError, is_out_of_memory
from snugfit.integrations._batches import bytes_of, divided, example_of, first_of, first_tensor, images_of
from snugfit.integrations._budget import LoopBudget, require
from snugfit.integrations._recomputation import recomputation_of

INSTALL = 'pip install "snugfit[accelerate]"'
require("accelerate", INSTALL)

__all__ = ["MemoryBudget"]


class MemoryBudget:
    """A context that fits a loop with ``accelerator.accumulate`` into a memory budget.

    On entry it measures training steps with the optimizer, which change nothing. Then it chooses into how many equal
    micro-batches each batch is divided, sets ``accelerator.gradient_accumulation_steps``, and chooses which units of
    ``network`` are computed again in the backward pass. The system enforces the budget until the context ends, and a
    line reports what was predicted, allowed and measured. The gradients are those of the whole batch, if the loss is a
    mean over images and no batch norm sees micro-batches. A last batch of fewer images than there are micro-batches
    counts less.

    Args:
        accelerator: of one process.
        memory: the budget, like ``"300MB"``.
        loss: from a batch (B, ...) of the loader to its mean loss, a scalar, as the loop computes it.
        model: what is trained, as ``accelerator.prepare`` returns it.
        optimizer: its optimizer, as ``accelerator.prepare`` returns it.
        loader: whole batches, not prepared yet.
        network: a part of the model, or the model, that maps images (B, ...) to one tensor, to recompute; without one,
            nothing is recomputed.

    Attributes:
        budget: what is enforced and measured; ``budget.record`` holds the figures.
    """

    def __init__(
        self,
        accelerator: Any,
        memory: str | int,
        loss: Callable[[Any], Tensor],
        *,
        model: nn.Module,
        optimizer: Any,
        loader: DataLoader[Any],
        network: nn.Module | None = None,
    ) -> None:
        if accelerator.num_processes > 1 or accelerator.gradient_accumulation_steps > 1:
            raise UsageError("MemoryBudget plans for one process, and sets gradient_accumulation_steps itself.")
        self.budget = LoopBudget(memory)
        self._accelerator, self._loss, self._model, self._network = accelerator, loss, model, network
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._whole = loader
        made, self._batches = divided(loader)
        self._loader: Any = accelerator.prepare(made)
        self._recomputation: Any = None

    @property
    def loader(self) -> Iterator[Any]:
        """An epoch of micro-batches (B, ...), to loop over with ``accelerator.accumulate``."""
        for batch in self._loader:
            self.budget.begin(images_of(batch), trains=True)
            yield batch
            self.budget.end()
            self.budget.steps += bool(self._accelerator.sync_gradients)

    def __enter__(self) -> MemoryBudget:
        with in_mode(self._model, True):
            plan = self.budget.plan(self._model, self._step, self._batches.whole)
        self._batches.parts = self._accelerator.gradient_accumulation_steps = plan.micro_batches
        self._recomputation.use(plan.recomputation)
        self.budget.start()
        return self

    def _step(self) -> LibraryStep:
        batch = example_of(self._whole, self._batches.whole, self._accelerator.device)
        prepared = self._network is not None and "_original_forward" in vars(self._network)
        self._recomputation = recomputation_of(self._network, first_tensor(batch), self._lowered if prepared else None)

        def passes(images: int) -> None:
            self._loss(first_of(batch, images)).backward()

        return LibraryStep(self._model, [self._optimizer], passes, self._recomputation, bytes_of(batch))

    def _lowered(self, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A forward pass of images (B, ...) in the accelerator's precision, whose outputs (B, ...) are float32.

        That is what ``prepare`` makes of a model's.
        """

        def forward(images: Tensor) -> Tensor:
            """Images (B, ...) to outputs (B, ...)."""
            with self._accelerator.autocast():
                outputs = run(images)
            return outputs.float()

        return forward

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.budget.close()
        self._batches.parts = self._accelerator.gradient_accumulation_steps = 1
        self._recomputation.use("")
        if error is None:
            print(self.budget.record)
        elif is_out_of_memory(error):
            raise BudgetExceededError(self.budget.refused) from error
