"""What all peers share: images, a clock, the memory limit, and a plain training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peer import accuracy
from snugfit import _models as models
from snugfit._data import Batches, Splits, Transform
from snugfit._data.device_transform import Placement
from snugfit._upstream import to_channels_last
from snugfit.memory import MemoryLimit, PeakMeter, is_out_of_memory, release_memory
from snugfit.memory.address_space import KERNEL_BYTES, KernelAllowance
from snugfit.memory.device import has_own_memory, synchronize

MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4
LARGEST_TEST_BATCH = 16
SEARCH_OVERTIME = 2
"""Times its time that a search may take longer, so that something is learned of slow ones."""


@dataclass
class Race:
    """One peer's run.

    Attributes:
        model: name of the network.
        splits: the images.
        batch_size: images per optimizer step.
        lr: learning rate, constant.
        seed: seed of initialisation, shuffling and augmentation.
        seconds: time to train in, search included.
        limit: the memory limit, in force.
        meter: memory above the baseline.
        started: when the time began.
        steps: optimizer steps to train for instead of a time, without micro-batches.
        optimizer_class: SGD, or one with its arguments.
        images: images trained on after the search.
        training_seconds: what they took.
        step_seconds: seconds after the search, part by part, scaled to a step's images.
        found: what the search found, for the tables.
    """

    model: str
    splits: Splits
    batch_size: int
    lr: float
    seed: int
    seconds: float
    limit: MemoryLimit
    meter: PeakMeter
    started: float
    steps: int | None = None
    optimizer_class: Any = torch.optim.SGD
    images: int = 0
    training_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self.started)

    @property
    def unfinished(self) -> bool:
        """Whether there are steps to train; a search may have taken all the time, and one is done all the same."""
        if self.steps is not None:
            return self.images < self.steps * self.batch_size
        return self.left > 0 or not self.images

    def network(self, guarded: bool = True) -> nn.Module:
        """The network with fresh weights; guarded, it allows kernels of new shapes."""
        torch.manual_seed(self.seed)
        shape = self.splits.image_shape
        network = models.build(self.model, len(self.splits.class_names), shape[-1], shape[0])
        network = to_channels_last(network)
        network = network.to(self.limit.device)
        return guard(network, self.limit, self.meter) if guarded else network

    def source(self) -> Batches:
        """Training images, shuffled and augmented, on the device as snugfit does it."""
        batches = Batches(self.splits.train, self._transform(), seed=self.seed, augment=True)
        if has_own_memory(self.limit.device):
            batches.placement = Placement(self.limit.device, pinned=True)
        return batches

    def made_up(self, size: int) -> tuple[Tensor, Tensor]:
        """A batch of noise."""
        device = self.limit.device
        images = torch.randn(size, *self.splits.image_shape, device=device)
        return images.contiguous(memory_format=torch.channels_last), torch.zeros(size, dtype=torch.int64, device=device)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum."""
        settings = {"lr": self.lr, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
        return self.optimizer_class(network.parameters(), **settings)  # type: ignore[no-any-return]

    def train(self, network: nn.Module, micro: int, forward: nn.Module | None = None) -> nn.Module:
        """Train until the time is up, accumulating micro-batches to the batch size.

        Args:
            network: what is trained.
            micro: images at once.
            forward: how it is run; itself by default.
        """
        self.begin_training(micro)
        optimizer, run, group = (
            self.optimizer(network),
            network if forward is None else forward,
            self.batch_size // micro,
        )
        epoch = 0
        while self.unfinished:
            batches = self.source().epoch(epoch, micro)
            for _ in range(len(self.splits.train) // self.batch_size):
                began = time.perf_counter()
                for _ in range(group):
                    images, labels = (each.to(self.limit.device) for each in next(batches))
                    (nn.functional.cross_entropy(run(images), labels) / group).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                synchronize(self.limit.device)
                self.count(self.batch_size, time.perf_counter() - began)
                if not self.unfinished:
                    break
            epoch += 1
        return network

    def begin_training(self, micro: int) -> None:
        """The search is over."""
        self.found["micro_batch"], self.found["search_seconds"] = micro, round(self.seconds - self.left, 1)

    def count(self, images: int, seconds: float) -> None:
        """A step was done, or a part of one."""
        self.images, self.training_seconds = self.images + images, self.training_seconds + seconds
        self.step_seconds.append(seconds / images * self.batch_size)
        self.meter.mark()

    def test(self, network: nn.Module) -> float:
        """Accuracy on the test images."""
        images = self.splits.test if self.splits.test is not None else self.splits.val
        size = min(LARGEST_TEST_BATCH, int(self.found.get("micro_batch", 1)))
        return accuracy(network, Batches(images, self._transform()).in_order(size), self.limit.device)

    def _transform(self) -> Transform:
        splits = self.splits
        return Transform(splits.mean, splits.std, splits.flip)


class Headroom(KernelAllowance):  # type: ignore[no-untyped-call]
    """Refuses memory by the words of torch's allocator, which the peers' batch finders know."""

    def _require(self, func: Any, args: Any, kwargs: Any) -> None:
        try:
            super()._require(func, args, kwargs)
        except MemoryError as error:
            raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: {error}") from error


@contextmanager
def kernel_allowance(limit: MemoryLimit) -> Iterator[None]:
    """Context for passes on new shapes, as :meth:`MemoryLimit.allow_kernels`."""
    limit.reserved_bytes += KERNEL_BYTES
    limit.refresh()
    try:
        with Headroom(limit):
            yield
    finally:
        limit.reserved_bytes -= KERNEL_BYTES
        limit.refresh()


def guard(network: nn.Module, limit: MemoryLimit, meter: PeakMeter) -> nn.Module:
    """Keep the limit from refusing a peer what is only reserved: set it at every pass, with space for new kernels.

    From its first pass on a new shape to the next pass, what generates kernels gets address space for them.
    """
    seen: set[tuple[bool, torch.Size]] = set()
    allowances: list[AbstractContextManager[None]] = []

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if allowances:
            allowances.pop().__exit__(None, None, None)
        meter.mark()
        limit.refresh()
        key = (module.training, inputs[0].shape)
        if key not in seen and limit.kernel_bytes:
            seen.add(key)
            allowances.append(kernel_allowance(limit))
            allowances[-1].__enter__()

    network.register_forward_pre_hook(before)
    return network


def largest(race: Race, attempt: Callable[[int], float]) -> tuple[int, float]:
    """The first of the batch size, half of it, a quarter ... at which two steps pass, and the seconds of the second.

    Where a number of steps is asked for, it is the batch size alone.

    Raises:
        MemoryError: nothing fits.
    """
    micro, least = race.batch_size, 1 if race.steps is None else race.batch_size
    while micro >= least and race.left > -SEARCH_OVERTIME * race.seconds:
        try:
            return micro, attempt(micro)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        release_memory()
        micro //= 2
    raise MemoryError("not one image fits" if micro < least else "the time was up before anything that fits was found")


def try_steps(race: Race, network: nn.Module, run: nn.Module, micro: int) -> float:
    """Two optimizer steps on noise, each of up to two micro-batches; seconds per image of the second."""
    optimizer, parts, seconds = race.optimizer(network), min(race.batch_size // micro, 2), 0.0
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(parts):
            images, labels = race.made_up(micro)
            (nn.functional.cross_entropy(run(images), labels) / parts).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        synchronize(race.limit.device)
        seconds = (time.perf_counter() - began) / (parts * micro)
    race.meter.mark()
    return seconds
