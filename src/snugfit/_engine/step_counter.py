"""Training steps of one network on the meta device, which allocates and computes nothing, and their tensors.

Any module can be counted, whether or not it can be traced and divided. Real steps are those that ``backprop`` runs.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._chain import Chain
from snugfit._chain.store import copy_empty
from snugfit._chain.unit import run_failure
from snugfit._core.estimate import PROCESS_EXTRA_BYTES, EstimateOptions
from snugfit._core.parts import part_sizes
from snugfit._core.workload import OptimizerSettings, Workload
from snugfit._engine.process import baseline, choose_device
from snugfit._engine.step_inputs import StepInputs
from snugfit._training.network import NetworkTrainer
from snugfit._upstream import to_channels_last
from snugfit.errors import BudgetExceededError, ModelError, SnugfitError
from snugfit.lean.bfloat16_weights import store_bfloat16
from snugfit.memory import MemoryLimit, is_out_of_memory, make_meter, tensor_peak_bytes
from snugfit.memory.step_bytes import UPDATE, StepBytes
from snugfit.memory.tensors import LiveBytes
from snugfit.profiling import Probe, measure_probe, smallest_floor
from snugfit.strategies.memory_estimates import fill_synthetic_weights
from snugfit.strategies.recomputation.paging import recomputing_forward
from snugfit.strategies.recomputation.schedule import AnySchedule

LARGEST_POWER = 10
"""The largest batch that is tried has 2 to this power images. Counting more takes long where gradients are computed in
parts of a few images, as on feature maps of a few pixels."""


@dataclass
class StepCounter:
    """Counts the tensors of training steps of one network, whose module is on the meta device and stays as it is."""

    module: nn.Module
    name: str
    options: EstimateOptions

    def __post_init__(self) -> None:
        self.module.train()
        self.not_divided = ""
        if self.options.weight_dtype == "bfloat16":
            store_bfloat16(self.module)
        to_channels_last(self.module)
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            raise ModelError(f"{self.name} has no parameter that requires a gradient: nothing to train.")

    @cached_property
    def inputs(self) -> StepInputs:
        """What it takes; floats are of its first parameter's type."""
        dtype = next(each.dtype for each in self.module.parameters() if each.is_floating_point())
        return StepInputs(self.options.shape, self.options.inputs, dtype)

    @cached_property
    def chain(self) -> Chain | None:
        """The network in units; None if it cannot be divided, and ``not_divided`` says why."""
        try:
            module = copy.deepcopy(self.module)
            return Chain.from_module(module, self.options.shape, self.name, self.options.inputs)
        except SnugfitError as error:
            self.not_divided = str(error)
            return None

    @property
    def has_batch_norms(self) -> bool:
        """Whether images of a step depend on each other."""
        return any(isinstance(layer, _BatchNorm) for layer in self.module.modules())

    @cached_property
    def fewest(self) -> int:
        """Fewest images of a step: batch norms cannot train on one value per channel."""
        return smallest_floor(self.peak)[0]

    def workload(self, batch: int, settings: OptimizerSettings | None = None) -> Workload:
        """The workload of steps of ``batch`` images."""
        options = self.options
        return Workload(
            self.name,
            "",
            options.shape,
            max(options.classes or 10, 1),
            batch,
            0,
            0,
            batch_size=batch,
            batch_limit=batch,
            optimizer=settings or options.settings,
            precision=options.precision,
            weight_dtype=options.weight_dtype,
            inputs=options.inputs,
        )

    @cached_property
    def map_shape(self) -> tuple[int, ...]:
        """Shape of the network's outputs (B, K, ...) behind B and K, such as () for logits."""
        module = copy.deepcopy(self.module)
        with torch.no_grad(), torch.device("meta"), LiveBytes():
            output = self.inputs.call(module, self.inputs.batch(2, "meta"))
        if not isinstance(output, Tensor) or output.dim() < 2 or not output.is_floating_point():
            found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise ModelError(
                f"{self.name} must return one tensor of logits, (batch, classes) or (batch, classes, ...), and returns "
                f"{found}; wrap it in a module that does."
            )
        return tuple(output.shape[2:])

    def batches(self, device: str, *, packed: bool = False) -> Callable[[int], tuple[Any, Tensor]]:
        """What makes synthetic inputs (B, ...), as one tensor if ``packed``, and classes for outputs (B, K, ...)."""
        inputs, label = self.inputs.packed if packed else self.inputs.batch, self.map_shape

        def make(batch: int) -> tuple[Any, Tensor]:
            return inputs(batch, device), torch.zeros((batch, *label), dtype=torch.int64, device=device)

        return make

    def trainer(
        self, batch: int, *, hold: bool, settings: OptimizerSettings | None = None, schedule: AnySchedule | None = None
    ) -> NetworkTrainer:
        """A trainer of a copy; with ``hold`` gradients are held, with a schedule units run again, on packed inputs."""
        module: nn.Module
        forward: Callable[[Any], Any]
        if schedule is not None and self.chain is not None:
            chain = copy.deepcopy(self.chain)
            module = chain.to_module()
            forward = recomputing_forward([unit.module for unit in chain.all_units], schedule)
        else:
            module = copy.deepcopy(self.module)
            forward = partial(self.inputs.call, module)
        return NetworkTrainer(module, forward, self.workload(batch, settings), 2 if hold else 1)

    def by_kind(self, batch: int) -> StepBytes:
        """What the second of two steps takes, as plain PyTorch runs it: the whole batch, then the update."""
        trainer, make = self.trainer(batch, hold=True), self.batches("meta")
        counter = StepBytes(trainer.module)

        def step() -> None:
            inputs, labels = make(batch)
            for each in (*inputs, labels):
                counter.mark(each, "batch")
            trainer.step(inputs, labels, update=False)
            del inputs, labels, each
            counter.enter(UPDATE)
            trainer.optimizers.step()

        with torch.device("meta"), counter.following():
            step()
            for state in trainer.optimizers.state().values():
                counter.mark(state, "optimizer_state")
            counter.restart()
            step()
        return counter

    def peak(
        self,
        batch: int,
        *,
        parts: int = 1,
        hold: bool = True,
        settings: OptimizerSettings | None = None,
        schedule: AnySchedule | None = None,
    ) -> int:
        """Peak bytes of live tensors in two steps, each of so many micro-batches."""
        trainer = self.trainer(batch, hold=hold, settings=settings, schedule=schedule)
        sizes, make = part_sizes(batch, parts), self.batches("meta", packed=schedule is not None)

        def step() -> None:
            for index, size in enumerate(sizes):
                trainer.step(*make(size), size / batch, index == parts - 1)

        with torch.device("meta"):
            return tensor_peak_bytes(step, trainer.modules, repeats=2)

    def largest_batch(self, memory: int) -> int:
        """The largest power of two of images, up to 1024, that is expected to fit; 0 if none does."""
        powers = range(self.fewest - 1, LARGEST_POWER + 1)
        found = bisect_right(powers, False, key=lambda power: self.peak(2**power) + PROCESS_EXTRA_BYTES > memory)
        return 2 ** powers[found - 1] if found else 0

    def measured(self, batch: int) -> int:
        """Peak of this process in real steps, above what it had before.

        Raises:
            BudgetExceededError: memory is refused.
        """
        device = choose_device(None)
        resting = baseline(self.options.threads, device)

        def build() -> Callable[[int], object]:
            module = copy_empty(self.module, self.module, str(device))
            fill_synthetic_weights(module)
            trainer = NetworkTrainer(module, partial(self.inputs.call, module), self.workload(batch), 2)
            make = self.batches(str(device))
            return lambda size: trainer.step(*make(size), update=True)

        probe = Probe("network", build, self.peak, batch, sizes=(batch,), warm_up=True)
        with MemoryLimit(None, resting, device) as limit, self.failures():
            line = measure_probe(probe, make_meter(resting, device), limit)
        if line is None:
            raise BudgetExceededError(f"memory is refused for a step of {batch} images; estimate fewer with --measure.")
        return int(line.points[-1].peak_bytes)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Context for running the network, without changing the caller's random numbers.

        Raises:
            ModelError: it does not run.
        """
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        except SnugfitError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failed = run_failure(self.name, self.options.shape, error, self.options.inputs)
            if "meta" in str(error):
                advice = "An estimate runs the network without values; its forward pass must not read any."
            elif isinstance(error, TypeError) and "argument" in str(error):
                advice = "Give what its forward pass takes, like --input-shape 3x224x224,16xint64."
            else:
                raise failed from error
            raise ModelError(f"{failed}\n{advice}") from error
