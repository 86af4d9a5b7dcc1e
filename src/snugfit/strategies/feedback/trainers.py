"""A training step by each feedback rule: autograd works within a unit at most, and only the head follows the loss."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from snugfit._chain import Chain
from snugfit._core.workload import Workload
from snugfit._training.network import NetworkTrainer
from snugfit._training.seeding import derive_seed
from snugfit._training.step import StepResult, cross_entropy_of, precision_context
from snugfit.local.feedback import (
    MODULATION,
    dfa_delta,
    drtp_delta,
    modulated,
    output_error,
    pepita_delta,
    random_projection,
)
from snugfit.local.single_layer import SingleLayer
from snugfit.strategies.feedback.config import FeedbackRule


class FeedbackTrainer(NetworkTrainer):
    """Trains a chain by a feedback rule, with accumulation or with every gradient applied and freed at once.

    Its random matrices are drawn from the run's seed, never change and are in no checkpoint.

    Args:
        chain: the chain, whose units share the network's parameters.
        module: the network.
        workload: optimizer, precision, seed and number of classes.
        micro_batches: batches accumulated to one step.
    """

    scale = 1.0

    def __init__(self, chain: Chain, module: nn.Module, workload: Workload, micro_batches: int = 1) -> None:
        super().__init__(module, chain.forward, workload, micro_batches)
        self.units, self.head = [unit.module for unit in chain.units], chain.head.module
        weight = next(module.parameters())
        self.matrices = [
            random_projection(
                workload.classes,
                shape,
                derive_seed(workload.seed, "feedback", index),
                scale=self.scale,
                dtype=weight.dtype,
                device=weight.device,
            )
            for index, shape in enumerate(self.projected_shapes(chain))
        ]
        holder = nn.Module()
        for index, matrix in enumerate(self.matrices):
            holder.register_buffer(f"matrix_{index}", matrix)
        self.modules.append(holder)

    def projected_shapes(self, chain: Chain) -> list[tuple[int, ...]]:
        """Shapes, for one image, of what the matrices lead to: the output of every unit before the head."""
        return [tuple(unit.output_shape) for unit in chain.units]

    def learn(self, inputs: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Give every parameter ``share`` of the rule's gradient; the loss (scalar) and the logits (B, K)."""
        raise NotImplementedError

    def step(self, inputs: Tensor, labels: Tensor, share: float = 1.0, update: bool = True) -> StepResult:
        """One (micro-)batch; see :class:`snugfit._training.loop.Trainable`."""
        self.module.train()
        self.optimizers.train()
        loss, logits = self.learn(inputs, labels, share)
        if update and self.micro_batches > 1:
            self.optimizers.step()
        return StepResult.of(loss, logits, labels)

    def _run(self, unit: nn.Module, features: Tensor) -> Tensor:
        with precision_context(features, bfloat16=self._bfloat16):
            output: Tensor = unit(features)
        return output

    def _train_head(self, features: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Train the head by the loss; the loss and the logits (B, K), detached."""
        loss, logits = cross_entropy_of(self.head, features, labels, bfloat16=self._bfloat16)
        _backward(loss * share)
        return loss.detach(), logits.detach()


class DirectFeedback(FeedbackTrainer):
    """DFA (Nokland 2016): the output error reaches every unit's output through that unit's own matrix."""

    def learn(self, inputs: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Run all units, then give each one what the error says."""
        outputs = []
        for unit in self.units:
            outputs.append(self._run(unit, inputs))
            inputs = outputs[-1].detach()
        loss, logits = self._train_head(inputs, labels, share)
        error = output_error(logits.to(self.matrices[0].dtype), labels)
        for matrix in reversed(self.matrices):
            _backward(outputs.pop(), dfa_delta(error, matrix).mul_(share))
        return loss, logits


class TargetProjection(FeedbackTrainer):
    """DRTP (Frenkel et al. 2021): the target reaches a unit's output as soon as that is there."""

    def learn(self, inputs: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Train unit after unit; nothing of one is kept for another but the output that it had before its update."""
        for unit, matrix in zip(self.units, self.matrices, strict=True):
            output = self._run(unit, inputs)
            inputs = output.detach()
            _backward(output, drtp_delta(labels, matrix).mul_(share))
            del output
        return self._train_head(inputs, labels, share)


class InputModulation(FeedbackTrainer):
    """PEPITA (Dellaferrera and Kreiman 2022): a second pass, on an input that carries the error, tells what to change.

    Both passes draw the same dropout. A norm's own scale and shift are not trained, as in the authors' experiments.
    """

    scale = MODULATION

    def __init__(self, chain: Chain, module: nn.Module, workload: Workload, micro_batches: int = 1) -> None:
        super().__init__(chain, module, workload, micro_batches)
        self.parts = [SingleLayer.of(unit) for unit in chain.units]
        self.last = SingleLayer.of(chain.head)

    def projected_shapes(self, chain: Chain) -> list[tuple[int, ...]]:
        """Shape of one image: the error is projected to the input alone."""
        return [tuple(chain.input_shape)]

    @torch.no_grad()
    def learn(self, inputs: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Run both passes; every layer learns in the second, the output layer from the first one's error."""
        seed = int(torch.randint(2**62, ()))
        torch.manual_seed(seed)
        answers, features = deque[Tensor](), inputs
        for part in self.parts:
            answers.append(part.response(part.layer(part.before(features))))
            features = part.after(answers[-1])
        logits: Tensor = self.head(features)
        error = output_error(logits, labels)
        torch.manual_seed(seed)
        features = modulated(inputs, error, self.matrices[0])
        del inputs
        for part in self.parts:
            sums = _differentiable(part.layer, part.before(features))
            answer = part.response(sums.detach())
            _backward(sums, pepita_delta(answers.popleft(), answer).mul_(share))
            del sums
            features = part.after(answer)
        _backward(_differentiable(self.last.layer, self.last.before(features)), error * (share / len(error)))
        return F.cross_entropy(logits, labels), logits


def _differentiable(layer: nn.Module, inputs: Tensor) -> Tensor:
    with torch.enable_grad():
        output: Tensor = layer(inputs)
    return output


def _backward(output: Tensor, delta: Tensor | None = None) -> None:
    """Carry a gradient of the output's shape (1 for a scalar) to the parameters behind it, if any of them trains."""
    if output.requires_grad:
        output.backward(None if delta is None else delta.to(output.dtype))


TRAINERS: dict[FeedbackRule, type[FeedbackTrainer]] = {
    "dfa": DirectFeedback,
    "drtp": TargetProjection,
    "pepita": InputModulation,
}
