"""A memory budget for a training loop of one's own."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit._chain.hooks import hook_of
from snugfit._chain.python_state import restored
from snugfit._chain.random_numbers import random_numbers_kept
from snugfit._core.amounts import parse_bytes
from snugfit._core.keywords import LoopKeywords, with_keywords
from snugfit._core.options import Checked, Count, Size, from_keywords
from snugfit._core.own_cores import on_own_core
from snugfit._core.parts import part_sizes
from snugfit._core.request import Request
from snugfit._core.workload import OptimizerState
from snugfit._engine.builder import optimizer_of, require_optimizer_name
from snugfit._engine.loop_plan import LoopPlan, LoopPlanner, planning, step_workload
from snugfit._engine.loop_trainer import LoopNetwork, parts_of
from snugfit._engine.packed_batches import SeveralInputs, as_tensor, inputs_of_batch, kind_of
from snugfit._engine.process import baseline
from snugfit._quantities import format_bytes
from snugfit._training.ignored_targets import IgnoredTargets, ignored_target
from snugfit._training.losses import Loss, require_mean_for
from snugfit._training.run import TRIM_SECONDS
from snugfit.errors import MEMORY_ERRORS, BudgetExceededError, ModelError, UsageError, is_out_of_memory
from snugfit.memory import MemoryLimit, PeakMeter, make_meter, release_memory, trim_heap
from snugfit.profiling import META_PASS_BYTES
from snugfit.strategies.recomputation.schedule import Schedule, parse_schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OWN_OPTIMIZER = "snugfit.memory.MemoryLimit bounds a training loop with an optimizer of your own."


@dataclass(frozen=True)
class LoopOptions(Checked):
    """The options of :func:`fit`, with the defaults of :func:`snugfit.plan`."""

    memory: Size
    batch_size: Count = 128
    optimizer: Literal["sgd", "adamw"] = "sgd"
    optimizer_state: OptimizerState | None = None
    lr: float | None = None
    weight_decay: float | None = None
    keep_freed: bool | None = None

    def request(self) -> Request:
        """The same as the request of a plan, which checks learning rate and weight decay."""
        options = asdict(self)
        del options["keep_freed"]
        return Request.of(**options)


@dataclass(frozen=True)
class FitRecord:
    """What a loop was predicted, allowed and measured to use; prints as a line.

    >>> print(FitRecord(21_000_000, 35_000_000, 17_000_000, 32, 2, "", True, 12))
    memory: predicted 21.0 MB, allowed 35.0 MB (enforced), measured 17.0 MB in 12 steps; images at once: 2 x 32

    Attributes:
        predicted_bytes, budget_bytes, measured_bytes: peaks of memory above the baseline.
        micro_batch: most images in memory at once; a whole batch is divided into ``micro_batches``.
        recomputation: units or modules whose feature maps are computed again, such as ``(0-1) 2`` or
            ``modules (encoder.0-3)``; empty if none are.
        enforced: whether the system enforces the budget.
        steps: steps so far.
    """

    predicted_bytes: int
    budget_bytes: int
    measured_bytes: int
    micro_batch: int
    micro_batches: int
    recomputation: str
    enforced: bool
    steps: int

    @classmethod
    def of(cls, plan: LoopPlan, limit: MemoryLimit, measured_bytes: int, steps: int) -> FitRecord:
        """The record of a plan within a limit."""
        return cls(
            predicted_bytes=plan.predicted_bytes,
            budget_bytes=limit.budget_bytes or 0,
            measured_bytes=measured_bytes,
            micro_batch=plan.micro_batch,
            micro_batches=plan.micro_batches,
            recomputation=plan.recomputation,
            enforced=limit.enforced,
            steps=steps,
        )

    def __str__(self) -> str:
        sizes = (self.predicted_bytes, self.budget_bytes, self.measured_bytes)
        predicted, allowed, measured = map(format_bytes, sizes)
        parts = f"{self.micro_batches} x {self.micro_batch}" if self.micro_batches > 1 else str(self.micro_batch)
        again = f", recomputes {self.recomputation}" if self.recomputation else ""
        held = "enforced" if self.enforced else "not enforced here"
        return (
            f"memory: predicted {predicted}, allowed {allowed} ({held}), measured {measured} in {self.steps} steps; "
            f"images at once: {parts}{again}"
        )


Example = tuple[Tensor | SeveralInputs, Tensor]
"""Images (B, C, H, W), or several inputs (B, ...), and targets (B, ...)."""


class FitStep:
    """One training step of a loop inside a memory budget: what :func:`fit` gives.

    >>> from torch.nn import functional as F
    >>> import snugfit
    >>> model, example = nn.Linear(4, 2), (torch.randn(8, 4), torch.randint(2, (8,)))
    >>> with snugfit.fit(model, F.cross_entropy, memory="60MB", batch_size=8, example=example, lr=0.1) as step:
    ...     step.lr = step.lr / 2
    ...     loss = step(*example)
    >>> loss.shape, step.record.steps, sorted(step.state_dict())
    (torch.Size([]), 1, ['bias/momentum_buffer', 'weight/momentum_buffer'])

    Attributes:
        plan: how a batch is divided.
    """

    def __init__(
        self, network: LoopNetwork, plan: LoopPlan, limit: MemoryLimit, meter: PeakMeter, example: Example
    ) -> None:
        self.plan, self._limit, self._meter = plan, limit, meter
        units = len(network.chain.all_units)
        schedule = parse_schedule(plan.recomputation) if plan.recomputation else Schedule.keeping(units)
        self._trainer = network.trainer(schedule, plan.micro_batches > 1)
        self._first_lr = self._lr = network.optimizer.lr
        self._kinds = [kind_of(each)[0] for each in example]
        self._inputs = network.chain.inputs
        self._model = network.model
        self._modules = list(network.model.modules())
        self._trained = {id(each): each for each in network.model.parameters() if each.requires_grad}
        self._uncalled = network.chain.uncalled_modules(network.model)
        self._ignored = IgnoredTargets(network.loss, network.chain.head.output_shape, next(network.model.parameters()))
        self._known = {*part_sizes(plan.batch_size, plan.micro_batches)}
        self._steps = self._measured = 0
        self._closed = False
        self._freed = plan.freed_memory(meter, limit)
        self._trimmed_at = time.perf_counter()

    def __call__(self, images: Tensor | SeveralInputs, targets: Tensor) -> Tensor:
        """Train on images (B, C, H, W) and their targets (B, ...); the last batch of an epoch may be smaller.

        Instead of images there may be several inputs (B, ...) in a tuple, list or dictionary, as in the example.

        Returns:
            The mean loss of the batch, a scalar without a graph.

        Raises:
            UsageError: shapes, or types of several inputs, differ from the example's, there are more images than
                ``batch_size``, or the context has ended.
            DataError: an integer of several inputs is above 2^24.
            BudgetExceededError: memory is refused; gradients are freed, and the loop may go on.
        """
        self._check(images, targets)
        with self._keeping():
            return self._step(images, targets)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Keep freed memory in a step, and give it back afterwards, unless it is kept between steps, too."""
        if self.plan.kept_between:
            yield
            return
        try:
            with self._freed.kept(steps=True):
                yield
        finally:
            self._freed.pause(always=True)

    def _step(self, images: Tensor | SeveralInputs, targets: Tensor) -> Tensor:
        self._tick()
        sizes = self._part_sizes(len(targets))
        new = not self._known.issuperset(sizes)
        loss = None
        try:
            with on_own_core(), self._limit.allow_kernels() if new else nullcontext():
                loss = self._trainer.step(parts_of(as_tensor(images, self._inputs), targets, sizes))
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
        if loss is None:  # outside of the except clause, which keeps all tensors alive
            self._freed.give_up()
            release_memory()
            self._limit.refresh()
            raise self._exceeded(len(targets))
        self._known.update(sizes)
        self._steps += 1
        if len(targets) == self.plan.batch_size:  # smaller batches show less than layers may take
            self._freed.after_step()
        else:
            self._freed.between_steps()
        self._measured = max(self._measured, self._meter.mark())
        return loss

    def _part_sizes(self, count: int) -> tuple[int, ...]:
        """Sizes of the micro-batches of so many images.

        ``BatchNorm1d`` cannot take the one image that is left of an odd last batch in parts of two: one part has three.
        """
        sizes = part_sizes(count, -(-count // self.plan.micro_batch))
        alone = sizes[-1] == 1 < count < self.plan.batch_size and self.plan.micro_batch > 1
        if alone and any(isinstance(each, nn.BatchNorm1d) and each.training for each in self._modules):
            return part_sizes(count, count // 2)
        return sizes

    def _check(self, images: Tensor | SeveralInputs, targets: Tensor) -> None:
        if self._closed:
            raise UsageError(
                "a step was called after the context of snugfit.fit, where no budget holds; move it inside."
            )
        self._check_model()
        if not isinstance(targets, Tensor):
            raise UsageError(
                f"the targets of a step must be a tensor, as in the example, not {type(targets).__name__}."
            )
        kind, count = kind_of(images)
        kinds = [kind, kind_of(targets)[0]]
        if kinds != self._kinds or count != len(targets):
            raise UsageError(
                f"a step got {count} images and {len(targets)} targets of shapes {kinds}; the plan is for as many "
                f"of each, of shapes {self._kinds}: give such an example=."
            )
        if not 0 < count <= self.plan.batch_size:
            raise UsageError(f"a step got {count} images, and the plan is for 1 to batch_size={self.plan.batch_size}.")
        ignored = self._ignored.among(targets) if len(self._part_sizes(count)) > 1 else None
        if ignored is not None:
            raise UsageError(
                f"a step got targets of {ignored}, which the loss ignores, and divides its images into "
                f"micro-batches of {self.plan.micro_batch}, whose means would not be that of the batch. Leave these "
                "images out, use a larger memory=, or smaller batches."
            )

    def _check_model(self) -> None:
        """Refuse changes of the model that a step would not follow."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._trained:
                raise UsageError(
                    f"'{name}' did not train when snugfit.fit began; end the context, and begin another one after "
                    "layers were unfrozen or replaced."
                )
        for name, module in self._uncalled:
            if kind := hook_of(module):
                raise UsageError(
                    f"{kind} of '{name}' was registered after snugfit.fit had begun, and would not run; register it "
                    "before."
                )

    def _tick(self) -> None:
        """Read the peak, and let the limit follow the memory that is mapped; trim the heap at times."""
        self._freed.between_steps()
        self._measured = max(self._measured, self._meter.mark())
        if time.perf_counter() - self._trimmed_at > TRIM_SECONDS and not self._freed.keeps:
            trim_heap()
            self._trimmed_at = time.perf_counter()
        self._limit.refresh()

    def _exceeded(self, images: int) -> BudgetExceededError:
        partly = "" if self._trainer.holds else " Some weights may have been updated before."
        return BudgetExceededError(
            f"a step of {images} images was refused memory within memory={format_bytes(self.record.budget_bytes)}, "
            f"although it was predicted to fit: the loop keeps the rest.{partly} Free what it keeps between steps, or "
            "use a larger memory=."
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next step; set it to follow a schedule."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        if not isinstance(value, (Real, Tensor)) or not 0 <= float(value) < math.inf:
            raise UsageError(f"step.lr must be a number of 0 or more, not {value!r}.")
        value = float(value)
        self._lr = value
        self._trainer.optimizers.set_lr_factor(value / self._first_lr)

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors of the optimizer's state, of any shapes, by name, for a checkpoint of one's own."""
        return self._trainer.optimizers.state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state of :meth:`state_dict`, in its shapes; raises CheckpointError if it is another network's."""
        self._trainer.optimizers.load_state(state)

    @property
    def record(self) -> FitRecord:
        """What was predicted, allowed and measured so far."""
        return FitRecord.of(self.plan, self._limit, self._measured, self._steps)

    def _close(self) -> None:
        """Read the peak for the last time, return freed memory, and remove all hooks and gradients from the model."""
        self._measured = max(self._measured, self._meter.mark())
        self._freed.close()
        self._closed = True
        self._trainer.optimizers.detach_hooks()
        self._trainer.optimizers.zero_grad()


@contextmanager
def fit(
    model: nn.Module,
    loss_function: Loss,
    *,
    example: Example,
    memory: str | int,
    **options: Unpack[LoopKeywords],
) -> Iterator[FitStep]:
    """Train a module in a loop of one's own, inside a memory budget.

    It measures steps of the module on the example, which change nothing, and chooses how many images are in memory at
    once and which units or modules are computed again in the backward pass. Each step then has the gradients of the
    whole batch. The system enforces the budget until the end of the context, in all that the loop does. The budget
    counts from :func:`snugfit.prepare_process`, or from here if that was not called.

    >>> import torch
    >>> import snugfit
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 10))
    >>> images, targets = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    >>> loss_function = torch.nn.functional.cross_entropy
    >>> with snugfit.fit(model, loss_function, memory="60MB", batch_size=32, example=(images, targets)) as step:
    ...     losses = [float(step(images, targets)) for _ in range(3)]
    >>> losses[2] < losses[0], step.record.measured_bytes <= step.record.predicted_bytes <= 60_000_000
    (True, True)

    Args:
        model: maps images (B, C, H, W), or several inputs (B, ...), to one tensor; trained in place, in the modes that
            its layers are in.
        loss_function: of outputs and targets (B, ...); the mean over the batch.
        example: images (B, C, H, W) and targets (B, ...) as the loop gives them; of any number. Instead of images a
            tuple, list or dictionary of several inputs (B, ...), for a network that takes them by position or by
            keyword: float32, integers up to 2^24 or booleans. Each batch is copied into a tensor, which takes memory.
        memory: the budget, like ``"300MB"``.
        **options: ``batch_size``, ``optimizer`` (``sgd`` or ``adamw``), ``optimizer_state``, ``lr`` and
            ``weight_decay``, with the defaults of :func:`snugfit.plan`; the learning rate stays constant unless
            ``step.lr`` is set. Freed memory is kept within a step, for speed; with ``keep_freed=True`` also between
            steps, so that validation has less memory. By default that is done if another step would still fit.

    Raises:
        UsageError, DataError: an option, the example or the loss cannot be used.
        ModelError: the model cannot be trained.
        InfeasibleBudgetError: nothing fits the budget.
        BudgetExceededError: a whole batch does not fit the budget.
    """
    require_optimizer_name(options.get("optimizer"), "'sgd' or 'adamw'", _OWN_OPTIMIZER)
    chosen = from_keywords(LoopOptions, {"memory": memory, **options})
    _require_example(example)
    device = _device_to_train_on(model)
    resting = baseline(None, device)
    meter = make_meter(resting, device)  # its thread begins before memory is limited
    with MemoryLimit(int(parse_bytes(chosen.memory)), resting, device) as limit:
        with planning(chosen.batch_size, limit), restored(loss_function):
            step = _planned(model, loss_function, example, chosen, limit, meter)
        try:
            release_memory()
            meter.restart()
            with step._freed.kept(steps=True) if step.plan.kept_between else nullcontext():
                yield step
        finally:
            step._close()


vars(fit)["__signature__"] = with_keywords(fit, {each.name: each.default for each in fields(LoopOptions)})


@random_numbers_kept()
def _planned(
    model: nn.Module,
    loss_function: Loss,
    example: Example,
    chosen: LoopOptions,
    limit: MemoryLimit,
    meter: PeakMeter,
) -> FitStep:
    """Measure steps within a limit that is in force; the example has images (B, C, H, W) and targets (B, ...)."""
    inputs = () if isinstance(example[0], Tensor) else inputs_of_batch(example[0])[0]
    batch = as_tensor(example[0], inputs), example[1]
    with limit.allow_address_space(META_PASS_BYTES):
        shape = cast("tuple[int, int, int]", tuple(batch[0].shape[1:]))
        chain = Chain.from_any_module(model, shape, inputs=inputs)
        weight = next(model.parameters())
        with _without(model, chain.stores):
            require_mean_for(loss_function, chain.head.output_shape, batch[1], weight, ignored_target(loss_function))
    network = LoopNetwork(model, chain, loss_function, optimizer_of(chosen.request()))
    if weight.device.type == "cpu" and network.optimizer.name == "sgd" and _trains_float16(model):
        raise UsageError(
            "weights in float16 learn next to nothing by torch's fused SGD on a processor; use bfloat16, or float32 "
            "with autocast."
        )
    workload = step_workload(network.model, shape, chosen.batch_size, network.optimizer, inputs)
    images, targets = (_resized(each, chosen.batch_size).to(limit.device) for each in batch)
    plan = LoopPlanner(network, workload, (images, targets), limit, meter).plan()
    return FitStep(network, plan.with_kept_memory(limit, chosen.keep_freed), limit, meter, example)


@contextmanager
def _without(model: nn.Module, stores: Sequence[str]) -> Iterator[None]:
    """Refuse a loss, called inside, that reads an attribute in which forward passes store a feature map."""
    owners = [(model.get_submodule(path), key) for path, _, key in (name.rpartition(".") for name in stores)]
    kept = [(owner, key, vars(owner).pop(key)) for owner, key in owners if key in vars(owner)]
    try:
        yield
    except UsageError as error:
        name = getattr(error.__cause__, "name", None)
        if name not in {key for _, key in owners}:
            raise
        raise UsageError(
            f"the loss reads '{name}', which the network's forward pass stores and the units of a step do not; let the "
            "network return it, such as in one tensor with its outputs."
        ) from error
    finally:
        for owner, key, value in kept:
            setattr(owner, key, value)


def _device_to_train_on(model: Any) -> torch.device:
    """The device of a module of which anything can be trained; raises UsageError or ModelError for anything else."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is {model!r}; pass a module.")
    device = module_device(model)
    if not any(each.requires_grad for each in model.parameters()):
        raise ModelError(f"no parameter of {type(model).__name__} requires a gradient: there is nothing to train.")
    return device


def module_device(model: nn.Module) -> torch.device:
    """The device of a module's parameters; raises ModelError if it has none."""
    first = next(model.parameters(), None)
    if first is None:
        raise ModelError(f"{type(model).__name__} has no parameters: there is nothing to train.")
    return first.device


def _require_example(example: Any) -> None:
    """Refuse an example that is no pair of images (B, ...) and targets (B, ...)."""
    pair = isinstance(example, (tuple, list)) and len(example) == 2
    if not (pair and all(_is_batch(each) for each in example) and isinstance(example[1], Tensor)):
        raise UsageError(
            "example= must be a pair of tensors, (images, targets), as the loop gives them to a step; of several "
            "inputs, ((a, b), targets) or ({'a': a, 'b': b}, targets)."
        )
    count = kind_of(example[0])[1]
    if not count == len(example[1]) > 0:
        raise UsageError(
            f"example= has {count} images and {len(example[1])} targets; give as many of each, at least one."
        )


def _is_batch(given: object) -> bool:
    return given.dim() > 0 if isinstance(given, Tensor) else isinstance(given, (tuple, list, Mapping))


def _trains_float16(model: nn.Module) -> bool:
    return any(each.dtype == torch.float16 and each.requires_grad for each in model.parameters())


def _resized(tensor: Tensor, count: int) -> Tensor:
    """The first ``count`` of a tensor (B, ...), which repeats if it has fewer, in the same layout."""
    if len(tensor) >= count:
        return tensor[:count]
    made = tensor[torch.arange(count, device=tensor.device) % len(tensor)]
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    return made.contiguous(memory_format=torch.channels_last) if last else made
