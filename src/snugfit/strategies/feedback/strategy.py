"""The ``feedback`` strategy: the whole network in memory, trained without backpropagation through it.

Autograd stays within a unit, and only the head follows the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit._core.hardware import Hardware
from snugfit._core.profile import UnitStats
from snugfit._core.workload import Workload
from snugfit._training.network import NetworkTrainer
from snugfit._training.seeding import derive_seed
from snugfit._training.task import StepResult, loss_of, needs_classes, precision_context
from snugfit.errors import ModelError
from snugfit.strategies.feedback import rules
from snugfit.strategies.feedback.config import FeedbackOptions, FeedbackRule
from snugfit.strategies.feedback.single_layer import SingleLayer
from snugfit.strategies.full_network import FullNetwork, MakeTrainer


class FeedbackTrainer(NetworkTrainer):
    """Trains a chain by a feedback rule, with accumulation or with every gradient applied and freed at once.

    The random matrices are drawn from the run's seed. They never change and are in no checkpoint.
    """

    scale = 1.0

    def __init__(self, chain: Chain, module: nn.Module, workload: Workload, micro_batches: int = 1) -> None:
        super().__init__(module, chain.forward, workload, micro_batches)
        self.units, self.head = [unit.module for unit in chain.units], chain.head.module
        weight = next(module.parameters())
        draw = partial(rules.random_projection, scale=self.scale, dtype=weight.dtype, device=weight.device)
        self.matrices: list[Tensor] = []
        holder = nn.Module()
        for index, shape in enumerate(self.projected_shapes(chain)):
            self.matrices.append(draw(workload.classes, shape, derive_seed(workload.seed, "feedback", index)))
            holder.register_buffer(f"matrix_{index}", self.matrices[-1])
        self.modules.append(holder)

    def projected_shapes(self, chain: Chain) -> list[tuple[int, ...]]:
        """Target shapes of the matrices, for one image: the output of every unit before the head."""
        return [tuple(unit.output_shape) for unit in chain.units]

    def learn(self, inputs: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Add ``share`` of the rule's gradient to every parameter.

        Inputs (B, C, H, W) and labels (B,) to the loss (scalar) and the logits (B, K).
        """
        raise NotImplementedError

    def step(self, inputs: Tensor, labels: Tensor, share: float = 1.0, update: bool = True) -> StepResult:
        """One (micro-)batch, inputs (B, C, H, W) and labels (B,); see :class:`snugfit._training.loop.Trainable`."""
        self.module.train()
        self.optimizers.train()
        loss, logits = self.learn(inputs, labels, share)
        if update and self.micro_batches > 1:
            self.optimizers.step()
        return StepResult.of(loss, logits, labels)

    def _run(self, unit: nn.Module, features: Tensor) -> Tensor:
        with precision_context(features, self._precision):
            output: Tensor = unit(features)
        return output

    def _train_head(self, features: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Train the head by the loss on features (B, ...); the loss (scalar) and the logits (B, K), detached."""
        loss, logits = loss_of(self.head, features, labels, self.task.loss, self._precision)
        _backward(loss * share)
        return loss.detach(), logits.detach()


class DirectFeedback(FeedbackTrainer):
    """DFA (Nokland 2016): the output error is projected to every unit's output by that unit's matrix."""

    def learn(self, inputs: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Run all units on inputs (B, C, H, W), then give each unit its projected error."""
        outputs = []
        for unit in self.units:
            outputs.append(self._run(unit, inputs))
            inputs = outputs[-1].detach()
        loss, logits = self._train_head(inputs, labels, share)
        error = rules.output_error(logits.to(self.matrices[0].dtype), labels)
        for matrix in reversed(self.matrices):
            _backward(outputs.pop(), rules.dfa_delta(error, matrix).mul_(share))
        return loss, logits


class TargetProjection(FeedbackTrainer):
    """DRTP (Frenkel et al. 2021): the target is projected to a unit's output as soon as it is computed."""

    def learn(self, inputs: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Train unit after unit on inputs (B, C, H, W); a unit only passes on its output from before its update."""
        for unit, matrix in zip(self.units, self.matrices, strict=True):
            output = self._run(unit, inputs)
            inputs = output.detach()
            _backward(output, rules.drtp_delta(labels, matrix).mul_(share))
            del output
        return self._train_head(inputs, labels, share)


class InputModulation(FeedbackTrainer):
    """PEPITA (Dellaferrera and Kreiman 2022): updates come from a second pass, on an input modulated by the error.

    Both passes use the same dropout. Scale and shift of norms are not trained, as in the authors' experiments.
    """

    scale = rules.MODULATION

    def __init__(self, chain: Chain, module: nn.Module, workload: Workload, micro_batches: int = 1) -> None:
        super().__init__(chain, module, workload, micro_batches)
        self.parts = [SingleLayer.of(unit) for unit in chain.units]
        self.last = SingleLayer.of(chain.head)

    def projected_shapes(self, chain: Chain) -> list[tuple[int, ...]]:
        """Shape of one image: the error is projected to the input only."""
        return [tuple(chain.input_shape)]

    @torch.no_grad()
    def learn(self, inputs: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Run both passes on inputs (B, C, H, W); layers train in the second, the last by the error of the first."""
        seed = int(torch.randint(2**62, ()))
        torch.manual_seed(seed)
        answers, features = deque[Tensor](), inputs
        for part in self.parts:
            answers.append(part.response(part.layer(part.before(features))))
            features = part.after(answers[-1])
        logits: Tensor = self.head(features)
        error = rules.output_error(logits, labels)
        torch.manual_seed(seed)
        features = rules.modulated(inputs, error, self.matrices[0])
        del inputs
        for part in self.parts:
            sums = _differentiable(part.layer, part.before(features))
            answer = part.response(sums.detach())
            _backward(sums, rules.pepita_delta(answers.popleft(), answer).mul_(share))
            del sums
            features = part.after(answer)
        _backward(_differentiable(self.last.layer, self.last.before(features)), error * (share / len(error)))
        return self.task.loss(logits, labels), logits


def _differentiable(layer: nn.Module, inputs: Tensor) -> Tensor:
    with torch.enable_grad():
        output: Tensor = layer(inputs)
    return output


def _backward(output: Tensor, delta: Tensor | None = None) -> None:
    """Propagate a gradient of the output's shape (1 for a scalar) to its parameters, if any of them trains."""
    if output.requires_grad:
        output.backward(None if delta is None else delta.to(output.dtype))


TRAINERS: dict[FeedbackRule, type[FeedbackTrainer]] = {
    "dfa": DirectFeedback,
    "drtp": TargetProjection,
    "pepita": InputModulation,
}


@dataclass(frozen=True)
class Feedback(FeedbackOptions, FullNetwork):
    """The rules that LLS is compared with (its Table 2): DFA, DRTP and PEPITA."""

    name: ClassVar[str] = "feedback"
    exact: ClassVar[bool] = False
    probe: ClassVar[str] = "feedback"

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why the model is unsupported: PEPITA requires single layers and exact differences."""
        reasons = needs_classes(workload) + chain.reasons_against_units()
        if workload.label_smoothing:
            reasons.append("its rules project the error of unsmoothed targets; leave out --label-smoothing")
        if reasons or self.feedback_rule != "pepita":
            return reasons
        if workload.precision == "bfloat16":
            reasons.append("pepita compares two nearly equal passes, which bfloat16 cannot distinguish")
        for unit in chain.all_units:
            try:
                part = SingleLayer.of(unit)
            except ModelError as error:
                reasons.append(f"pepita: {error}")
                continue
            if unit is chain.head and not part.ends:
                reasons.append(f"pepita: the network must end in the weights of unit {unit.name}, whose error is known")
        return reasons

    def make_trainer(self, units: Sequence[UnitStats]) -> MakeTrainer:
        """Trainers by the rule."""
        return TRAINERS[self.feedback_rule]
