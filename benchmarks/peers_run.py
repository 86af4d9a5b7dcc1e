"""One peer in one process: train under an enforced memory limit for a given time, test, and print one JSON object.

The peer's packages are imported and warmed up before the baseline is taken, from which the limit counts; images,
network and search come after it. The limit is set anew at every pass, so that a peer is refused what it uses, never
address space that it reserves and does not touch; and the allocator is set to return freed memory at once, or, with
``--keep-freed``, to keep it, which is faster and takes more.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from benchmarks import peers_frameworks as frameworks
from benchmarks.common import program
from benchmarks.machine import alone_on
from benchmarks.peers_race import Race, guard, largest, try_steps
from snugfit import _data as datasets
from snugfit._core.amounts import parse_bytes
from snugfit._engine.process import choose_device
from snugfit.memory import MemoryLimit, is_out_of_memory, make_meter, prepare_process, release_memory
from snugfit.memory.freed_memory import KEEP_ALL_BYTES, KEPT_BLOCK_BYTES
from snugfit.memory.heap import set_thresholds
from snugfit.memory.process import late_bytes

SEGMENTS = (2, 3, 4, 6, 8, 12)
app = program("peers_run")


@dataclass(frozen=True)
class Way:
    """A peer.

    Attributes:
        run: trains until the time is up, and returns the network.
        prepare: imports and warms up its packages.
    """

    run: Callable[[Race], nn.Module]
    prepare: Callable[[], None] = lambda: None


@app.default
def main(
    *,
    way: str,
    model: str,
    memory: str,
    seconds: float = 120.0,
    steps: int | None = None,
    data: str = "cifar10",
    image_size: int | None = None,
    max_train: int | None = None,
    max_val: int | None = None,
    batch_size: int = 64,
    lr: float = 0.05,
    seed: int = 0,
    threads: int | None = None,
    device: str | None = None,
    keep_freed: bool = False,
) -> None:
    """Run one peer.

    Args:
        way: which peer.
        model: name of the network.
        memory: memory limit.
        seconds: time to train in, search included.
        steps: optimizer steps to train for instead, with the whole batch at once.
        data: data set, from the folder SNUGFIT_DATA.
        image_size: side of the images; the data set's own by default.
        max_train: training images.
        max_val: validation (and test) images.
        batch_size: images per optimizer step.
        lr: learning rate, constant.
        seed: seed of initialisation, shuffling and augmentation.
        threads: compute threads.
        device: cpu or cuda[:N].
        keep_freed: whether the heap keeps freed memory, as glibc does by default; otherwise it gives it back at once.
    """
    chosen = ways()[way]
    try:
        chosen.prepare()
    except ImportError as error:
        print(json.dumps({"missing": str(error.name)}))
        return
    where, baseline = choose_device(device or "cpu"), prepare_process(threads)
    meter, cap = make_meter(baseline, where), parse_bytes(memory)
    if keep_freed:
        set_thresholds(KEPT_BLOCK_BYTES, KEEP_ALL_BYTES)
    with alone_on(where), MemoryLimit(cap, baseline, where) as limit:
        started = time.perf_counter()
        splits = datasets.load(data, image_size=image_size, max_train=max_train, max_val=max_val, seed=seed)
        race = Race(model, splits, batch_size, lr, seed, seconds, limit, meter, started, steps)
        outcome = attempt(race, chosen)
    limit, meter = race.limit, race.meter  # a peer may have begun to count later
    meter.mark()
    outcome |= {"peak_bytes": meter.peak_bytes, "cap_bytes": cap, "within": meter.peak_bytes <= cap}
    outcome["rest_bytes"] = limit.baseline.anon + late_bytes()
    print(json.dumps(outcome))


def ways() -> dict[str, Way]:
    """All peers by name."""
    compiled = {
        f"compile-{budget}": Way(partial(frameworks.compiled, budget=budget), frameworks.prepare_compile)
        for budget in frameworks.MEMORY_BUDGETS
    }
    return {
        "plain": Way(plain),
        "micro": Way(micro_batches),
        "checkpoint": Way(checkpointed),
        "save_on_cpu": Way(offloaded),
        "lightning": Way(frameworks.lightning, frameworks.prepare_lightning),
        "accelerate": Way(frameworks.accelerate, frameworks.prepare_accelerate),
        "bitsandbytes": Way(eight_bit, frameworks.prepare_bitsandbytes),
        **compiled,
    }


def attempt(race: Race, way: Way) -> dict[str, Any]:
    """Train and test; what happened, also where memory was refused or the peer failed otherwise."""
    outcome: dict[str, Any] = {"accuracy": None, "refused": False, "failure": None}
    try:
        network = way.run(race)
        network.zero_grad()
        release_memory()
        outcome["used_seconds"] = race.seconds - race.left
        outcome["accuracy"] = race.test(network)
    except Exception as error:  # whatever a peer raises is its result
        outcome["refused"] = is_out_of_memory(error)
        outcome["failure"] = describe(error)
        traceback.print_exc()
        outcome["used_seconds"] = race.seconds - race.left
    if race.images:
        outcome["seconds_per_epoch"] = race.training_seconds / race.images * len(race.splits.train)
        outcome["step_seconds"] = median(race.step_seconds)
    return {**outcome, "images": race.images, **race.found}


def describe(error: Exception) -> str:
    """An error in one line, and the package that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:160]} ({Path(last.filename).name})"


def plain(race: Race) -> nn.Module:
    """The whole batch at once."""
    return race.train(race.network(), race.batch_size)


def eight_bit(race: Race) -> nn.Module:
    """The whole batch at once, with momentum in 8 bits by bitsandbytes."""
    race.optimizer_class = frameworks.bitsandbytes_sgd()
    return plain(race)


def micro_batches(race: Race) -> nn.Module:
    """The largest micro-batch that is found by halving."""

    def steps(micro: int) -> float:
        network = race.network()
        return try_steps(race, network, network, micro)

    micro, _ = largest(race, steps)
    release_memory()
    return race.train(race.network(), micro)


def offloaded(race: Race) -> nn.Module:
    """Feature maps that are kept in the processor's memory, of the largest micro-batch that is found by halving."""

    def steps(micro: int) -> float:
        network = race.network()
        return try_steps(race, network, Offloaded(network), micro)

    micro, _ = largest(race, steps)
    release_memory()
    network = race.network()
    return race.train(network, micro, Offloaded(network))


class Offloaded(nn.Module):
    """A network whose saved tensors are copied to pinned memory by torch, and back."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        with torch.autograd.graph.save_on_cpu(pin_memory=images.is_cuda):
            logits: torch.Tensor = self.network(images)
        return logits


def checkpointed(race: Race) -> nn.Module:
    """``checkpoint_sequential``, with the number of segments and the micro-batch that are fastest of those that fit."""
    found: dict[int, tuple[int, float]] = {}

    def steps(count: int, micro: int) -> float:
        network = race.network(guarded=False)
        return try_steps(race, network, segmented(race, network, count), micro)

    for count in SEGMENTS:
        if race.left < race.seconds / 2 and found:
            break
        release_memory()
        try:
            found[count] = largest(race, partial(steps, count))
        except MemoryError:
            continue
    if not found:
        raise MemoryError("not one image fits with any number of segments")
    release_memory()
    best = min(found, key=lambda count: found[count][1])
    race.found["segments"] = best
    network = race.network(guarded=False)
    return race.train(network, found[best][0], segmented(race, network, best))


class Segmented(nn.Module):
    """A network as a sequence, cut into segments whose maps are recomputed."""

    def __init__(self, stages: list[nn.Module], segments: int) -> None:
        super().__init__()
        self.stages, self.segments = nn.Sequential(*stages), min(segments, len(stages))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        logits: torch.Tensor = checkpoint_sequential(  # type: ignore[no-untyped-call]
            self.stages, self.segments, images, use_reentrant=False
        )
        return logits


def segmented(race: Race, network: nn.Module, count: int) -> nn.Module:
    """A VGG or ResNet in segments, sharing its weights.

    An activation in place would change the map that a segment before it ends with, and that is to be kept.
    """
    for module in network.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return guard(Segmented(stages(network), count), race.limit, race.meter)


def stages(network: nn.Module) -> list[nn.Module]:
    """The layers of a VGG, or stem and blocks of a ResNet, as a sequence."""
    children = dict(network.named_children())
    if "features" in children:
        body = list(children["features"])  # type: ignore[call-overload]
        return [*body, children["avgpool"], nn.Flatten(), children["classifier"]]
    blocks = [block for index in range(1, 5) for block in children[f"layer{index}"]]  # type: ignore[attr-defined]
    stem = [children["conv1"], children["bn1"], children["relu"]]
    return [*stem, *blocks, children["avgpool"], nn.Flatten(), children["fc"]]


if __name__ == "__main__":
    app()
