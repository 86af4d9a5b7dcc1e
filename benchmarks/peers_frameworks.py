"""Peers that need more than torch: Lightning's and accelerate's batch finders, and torch.compile."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.peers_race import Race, guard, largest, try_steps
from snugfit._data import Batches
from snugfit.memory import make_meter, prepare_process, release_memory

MEMORY_BUDGETS = (1.0, 0.5, 0.2)
FIRST_BATCH = 2
UNLIMITED_BYTES = 1 << 40


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """One epoch after the other as batches of a size."""

    def __init__(self, source: Batches, size: int) -> None:
        self.source, self.size, self.epoch = source, size, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self.source.epoch(self.epoch, self.size)
            self.epoch += 1


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 2))


def _trainer(race: Race | None = None, **settings: Any) -> Any:
    from lightning.pytorch import Trainer

    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    where = "cpu" if race is None or race.limit.device.type == "cpu" else "gpu"
    return Trainer(accelerator=where, devices=1, **quiet, default_root_dir=tempfile.gettempdir(), **settings)


def _module(network: nn.Module, race: Race | None = None) -> Any:
    """A LightningModule whose batch size Lightning may change."""
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.batch_size, self.began = network, FIRST_BATCH, 0.0

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            if race is None:
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return race.optimizer(self)

        def train_dataloader(self) -> DataLoader[Any]:
            if race is None:
                return DataLoader([(torch.randn(3, 8, 8), 0)] * 4, batch_size=2)
            return _loader(race, self.batch_size)

        def on_train_batch_start(self, batch: tuple[Tensor, Tensor], index: int) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, outputs: Any, batch: tuple[Tensor, Tensor], index: int) -> None:
            if race is not None and "micro_batch" in race.found:
                race.count(len(batch[1]), time.perf_counter() - self.began)

    return Classifier()


def _loader(race: Race, batch_size: int) -> DataLoader[Any]:
    if not batch_size:  # the first trial was refused, and halved
        raise MemoryError("not one image fits")
    return DataLoader(Endless(race.source(), batch_size), batch_size=None)


def prepare_lightning() -> None:
    """Import Lightning and let it train something tiny, tuner included."""
    from lightning.pytorch.tuner import Tuner

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tiny = _module(_tiny())
    Tuner(_trainer(max_steps=4)).scale_batch_size(tiny, init_val=1, max_trials=1, steps_per_trial=1)
    _trainer(max_steps=2).fit(tiny)


def lightning(race: Race) -> nn.Module:
    """``Tuner.scale_batch_size``, doubling to at most the batch size; then gradients accumulated to it."""
    from lightning.pytorch.tuner import Tuner

    network = race.network()
    module = _module(network, race)
    trials = (race.batch_size // FIRST_BATCH).bit_length()
    tuner = Tuner(_trainer(race, max_epochs=1))
    micro = tuner.scale_batch_size(module, init_val=FIRST_BATCH, max_trials=trials, max_val=2 * race.batch_size)
    del tuner
    release_memory()
    race.begin_training(int(micro))
    module.batch_size = int(micro)
    parts = max(race.batch_size // int(micro), 1)
    time_left = timedelta(seconds=max(race.left, 1))
    trainer = _trainer(race, max_epochs=1, max_time=time_left, accumulate_grad_batches=parts)
    trainer.fit(module)
    return network


def prepare_accelerate() -> None:
    """Import accelerate and let it prepare something tiny."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(cpu=True)
    tiny = _tiny()
    network, optimizer = accelerator.prepare(tiny, torch.optim.SGD(tiny.parameters(), lr=0.1, momentum=0.9))
    accelerator.backward(network(torch.randn(2, 3, 8, 8)).sum())
    optimizer.step()
    find_executable_batch_size(lambda batch_size: None, starting_batch_size=2)()
    AcceleratorState._reset_state(reset_partial_state=True)  # the next Accelerator would stay on the processor


def accelerate(race: Race) -> nn.Module:
    """``find_executable_batch_size`` around the training loop, from the batch size down."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=race.batch_size)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> nn.Module:
        parts = max(race.batch_size // batch_size, 1)
        on_cpu = race.limit.device.type == "cpu"
        accelerator = Accelerator(cpu=on_cpu, gradient_accumulation_steps=parts)
        network = race.network()
        network, optimizer = accelerator.prepare(network, race.optimizer(network))
        race.begin_training(batch_size)
        race.images, race.training_seconds, race.step_seconds = 0, 0.0, []
        for images, labels in Endless(race.source(), batch_size):
            began = time.perf_counter()
            here = images.to(race.limit.device), labels.to(race.limit.device)
            with accelerator.accumulate(network):
                accelerator.backward(nn.functional.cross_entropy(network(here[0]), here[1]))
                optimizer.step()
                optimizer.zero_grad()
            race.count(len(labels), time.perf_counter() - began)
            if race.left <= 0:
                break
        return accelerator.unwrap_model(network)  # type: ignore[no-any-return]

    return train()  # type: ignore[no-any-return, call-arg]


def bitsandbytes_sgd() -> Any:
    """Its SGD with momentum in 8 bits, a block of 256 values at a time; tensors below 4,096 values stay in float32."""
    from bitsandbytes.optim import SGD8bit

    return SGD8bit


def prepare_bitsandbytes() -> None:
    """Import bitsandbytes and let it update something."""
    layer = nn.Linear(64, 64)
    optimizer = bitsandbytes_sgd()(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.randn(2, 64)).sum().backward()
    optimizer.step()


def prepare_compile() -> None:
    """Let the compiler work on something tiny, forward and backward."""
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no pool of processes
    torch._inductor.config.force_disable_caches = True  # what another run compiled would cost nothing
    compiled = torch.compile(_tiny())
    compiled(torch.randn(2, 3, 8, 8)).sum().backward()


def compiled(race: Race, budget: float) -> nn.Module:
    """``torch.compile`` at an ``activation_memory_budget``, at the largest micro-batch found by halving.

    Compiling takes several times the memory of training, so it is done outside the limit, which counts from a baseline
    taken after it, less the weights. Its time counts.
    """
    import torch._functorch.config as settings

    settings.activation_memory_budget = budget
    kept: list[tuple[nn.Module, Any]] = []

    def steps(micro: int) -> float:
        kept.clear()
        release_memory()
        torch.compiler.reset()
        with race.limit.allow_address_space(UNLIMITED_BYTES):
            network = race.network(guarded=False)
            run = _compile(race, network, micro)
            _count_from_here(race, network)
        kept.append((network, run))
        return try_steps(race, network, run, micro)

    micro, _ = largest(race, steps)
    network, run = kept.pop()
    _begin_again(network, race.seed)
    return guard(race.train(network, micro, run), race.limit, race.meter)


def _compile(race: Race, network: nn.Module, micro: int) -> Any:
    """The network compiled, forward and backward, at one size."""
    began = time.perf_counter()
    run = torch.compile(network, dynamic=False)
    images, labels = race.made_up(micro)
    nn.functional.cross_entropy(run(images), labels).backward()  # type: ignore[no-untyped-call]
    network.zero_grad()
    race.found["compile_seconds"] = round(time.perf_counter() - began, 1)
    return run


def _count_from_here(race: Race, network: nn.Module) -> None:
    """Let limit and peak count from now, as if the weights alone had come since."""
    weights = sum(tensor.nbytes for tensor in network.state_dict().values())
    release_memory()
    resting = prepare_process()
    race.limit.baseline = replace(resting, anon=resting.anon - weights, data=resting.data - weights)
    race.meter = make_meter(race.limit.baseline, race.limit.device)


def _begin_again(network: nn.Module, seed: int) -> None:
    """Fresh weights in the place of those that the search has changed."""
    torch.manual_seed(seed)
    for module in network.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
