"""One operator of a traced network, run alone: with a gradient for its inputs, for its tensors, or for neither."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

REPEATS = 5
"""Timed runs, after one that is not (ElasticTrainer's profiler: five after two)."""
LONG_SECONDS, LONG_REPEATS = 0.02, 2
"""An operator that takes longer is timed twice only: its runs differ by little."""
Kept = dict[int, tuple[int | None, int]]
"""What autograd keeps, by storage: the number of the map that it is, None for what was made inside, and its bytes."""


@dataclass(frozen=True)
class Timed:
    """Seconds of a forward and a backward pass, and what was kept between them."""

    forward: float
    backward: float
    kept: Kept


class Operator:
    """A call with its arguments.

    Args:
        call: takes positional and keyword arguments.
        arguments: both.
        maps: the maps among the arguments, each with its number: what can have a gradient besides parameters.
        parameters: the trainable parameters that it reads, by name in the model.
        held: storages that are in memory anyway, of weights and buffers.
    """

    def __init__(
        self,
        call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        maps: Mapping[int, int],
        parameters: dict[str, nn.Parameter],
        held: set[int],
    ) -> None:
        self.call, self.parameters, self.maps, self.held = call, parameters, dict(maps), held
        self.leaves, self.structure = tree_flatten(arguments)
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and id(leaf) in maps]
        tensors = [leaf for leaf in (*self.leaves, *parameters.values()) if isinstance(leaf, Tensor)]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.in_place, self.macs = False, 0

    @property
    def numbers(self) -> dict[int, int]:
        """Number of the map in each storage that it reads."""
        return {storage(self.leaves[place]): self.maps[id(self.leaves[place])] for place in self.places}

    def forward(self) -> tuple[Any, float]:
        """Its output, with its arguments left as they are, and the seconds of a forward pass without gradients."""
        times: list[float] = []
        with torch.no_grad():
            self._look()
            while not enough(times):
                output, seconds = timed(partial(self._run, self._copies()), self.device)
                times.append(seconds)
        return output, typical(times)

    def gradient(self, *, of_inputs: bool, of: Iterable[str], output_map: int) -> Timed:
        """Seconds when the inputs or some parameters have gradients, and what is kept for them.

        Args:
            of_inputs: whether a gradient passes to every map that it reads.
            of: names of the parameters that train.
            output_map: number of the map that it gives.
        """
        trained = [self.parameters[name] for name in of]
        forward: list[float] = []
        backward: list[float] = []
        kept: Kept = {}
        for parameter in trained:
            parameter.requires_grad_(True)
        try:
            while not enough(backward):
                leaves, handed = self._fresh(of_inputs)
                output, seconds = self._recorded(handed, kept)
                forward.append(seconds)
                outputs = [v for v in tree_iter(output) if isinstance(v, Tensor) and v.requires_grad]
                if not outputs:
                    return Timed(typical(forward), 0.0, {})
                _number(kept, {storage(v) for v in outputs}, output_map)
                upper = [torch.ones_like(v) for v in outputs]
                wanted = [*leaves, *trained]
                backward.append(
                    timed(partial(torch.autograd.grad, outputs, wanted, upper, allow_unused=True), self.device)[1]
                )
        finally:
            for parameter in trained:
                parameter.requires_grad_(False)
        return Timed(typical(forward), typical(backward), kept)

    def _look(self) -> None:
        """Run once to see whether it works in place, and count its multiply-accumulates."""
        copies = {place: self.leaves[place].clone() for place in self.places}
        versions = {place: tensor._version for place, tensor in copies.items()}
        with FlopCounterMode(display=False) as counter:
            self._run(copies)
        self.macs = counter.get_total_flops() // 2
        self.in_place = any(tensor._version > versions[place] for place, tensor in copies.items())

    def _copies(self) -> dict[int, Tensor]:
        return {place: self.leaves[place].clone() for place in self.places} if self.in_place else {}

    def _fresh(self, of_inputs: bool) -> tuple[list[Tensor], dict[int, Tensor]]:
        """The tensors whose gradients are asked for, and the maps that are handed in for them."""
        leaves, handed = [], {}
        for place in self.places:
            tensor = self.leaves[place].detach()
            if of_inputs:
                leaves.append(tensor.requires_grad_(True))
            handed[place] = tensor.clone() if self.in_place else tensor
        return leaves, handed

    def _recorded(self, handed: dict[int, Tensor], kept: Kept) -> tuple[Any, float]:
        """Run it on these maps; its output, the seconds, and in ``kept`` what autograd keeps."""
        kept.clear()
        numbers = {storage(t): self.maps[id(self.leaves[place])] for place, t in handed.items()}

        def keep(tensor: Tensor) -> Tensor:
            if storage(tensor) not in self.held and tensor.numel():
                kept[storage(tensor)] = (numbers.get(storage(tensor)), tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return timed(partial(self._run, handed), self.device)

    def _run(self, handed: Mapping[int, Tensor]) -> Any:
        leaves = [handed.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.call(args, kwargs)


def _number(kept: Kept, storages: set[int], number: int) -> None:
    """Say which map an operator's own output is, where that is kept."""
    for key in storages & kept.keys():
        kept[key] = (number, kept[key][1])


def storage(tensor: Tensor) -> int:
    """Identity of the memory that a tensor is a view of."""
    return int(tensor.untyped_storage()._cdata)


def enough(times: list[float]) -> bool:
    """Whether an operator was timed often enough; the first run does not count."""
    return len(times) > (LONG_REPEATS if len(times) > 1 and min(times[1:]) > LONG_SECONDS else REPEATS)


def typical(times: list[float]) -> float:
    """Median seconds of all runs but the first, which generates kernels."""
    return statistics.median(times[1:] or times)


def timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What a function gives, and the seconds that it takes."""
    started = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - started
