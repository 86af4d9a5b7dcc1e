"""One operator of a traced network, run alone: with a gradient for its inputs, for its tensors, or for neither."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from snugfit._core.own_cores import on_own_core
from snugfit._stopwatch import Stopwatch
from snugfit.memory.device import device_at_rest
from snugfit.memory.tensors import LiveBytes, storage_id

REPEATS = 5
"""Number of timed runs, after an untimed one (ElasticTrainer's profiler: five after two)."""
LONG_SECONDS, LONG_REPEATS = 0.02, 2
"""An operator that takes longer is timed only twice, because its runs differ little."""

KernelContext = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saves: the number of a feature map, or None if it was made inside the operator.

    The sum of its values distinguishes the latter from others of its size.
    """

    map: int | None
    bytes: int
    values: float = 0.0


Kept = dict[int, SavedTensor]
"""By storage."""
Times = dict[tuple[bool, tuple[int, ...]], tuple[float, float]]
"""Seconds of a forward and a backward pass, by whether inputs have a gradient, and which parameters have one."""


@dataclass(frozen=True)
class Timed:
    """Seconds and memory of a forward and a backward pass.

    Attributes:
        kept: tensors saved between them.
        forward_scratch, backward_scratch: temporary bytes, without what was read, returned and saved.
        handed: identities of the arguments whose gradient lies in the memory of the output's gradient.
        passed: whether any of them received a gradient.
        macs: multiply-accumulates of the backward pass.
    """

    forward: float
    backward: float = 0.0
    kept: Kept = field(default_factory=dict)
    forward_scratch: int = 0
    backward_scratch: int = 0
    handed: frozenset[int] = frozenset()
    passed: bool = False
    macs: int = 0


class Operator:
    """A call with its positional and keyword arguments.

    Args:
        maps: numbers of the feature maps among the arguments; besides parameters only these can have a gradient.
        parameters: the trainable parameters that it reads, by name in the model.
        held: storages of weights and buffers, which are in memory anyway.
        constants: weights and buffers that it reads; saved tensors of their sizes do not grow with the batch.
        kernels: context for untimed runs, in which kernels are generated.

    Attributes:
        times: seconds measured so far; operators that compute the same on tensors of the same shapes may share them.
    """

    def __init__(
        self,
        call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        maps: Mapping[int, int],
        parameters: dict[str, nn.Parameter],
        held: set[int],
        constants: Iterable[Tensor] = (),
        kernels: KernelContext = nullcontext,
    ) -> None:
        self.call, self.parameters, self.maps, self.held = call, parameters, dict(maps), held
        self.leaves, self.structure = tree_flatten(arguments)
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and id(leaf) in maps]
        tensors = [leaf for leaf in (*self.leaves, *parameters.values()) if isinstance(leaf, Tensor)]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.constants = {tensor.numel() for tensor in constants}
        self.kernels = kernels
        self.in_place, self.macs, self.scratch = False, 0, 0
        self.times: Times = {}

    @property
    def numbers(self) -> dict[int, int]:
        """Number of the feature map in each storage that it reads."""
        return {storage_id(self.leaves[place]): self.maps[id(self.leaves[place])] for place in self.places}

    def forward(self) -> tuple[Any, float]:
        """Its output (B, ...), with its arguments unchanged, and the seconds of a forward pass without gradients."""
        times: list[float] = []
        with torch.no_grad():
            with self.kernels():
                self._look()
            if (known := self.times.get((False, ()))) is not None:
                return self._run(self._copies()), known[0]
            while not enough(times):
                output, seconds = timed(partial(self._run, self._copies()), self.device)
                times.append(seconds)
        self.times[False, ()] = typical(times), 0.0
        return output, typical(times)

    def gradient(self, *, of_inputs: bool, of: Iterable[str], output_map: int) -> Timed:
        """Measure both passes with gradients for all feature maps that it reads, or for the parameters named ``of``."""
        names = tuple(of)
        with self._training(names) as trained:
            with self.kernels():
                found = self._measured_once(of_inputs, trained, output_map)
            if not found.passed:
                return found
            case = (of_inputs, tuple(map(list(self.parameters).index, names)))
            if case not in self.times:
                self.times[case] = self._seconds(of_inputs, trained)
        forward, backward = self.times[case]
        return replace(found, forward=forward, backward=backward)

    def backward_macs(self, of: Iterable[str]) -> int:
        """Multiply-accumulates of a backward pass to the inputs and some parameters."""
        with self._training(of) as trained, self.kernels():
            return self._measured_once(True, trained, 0).macs

    @contextmanager
    def _training(self, names: Iterable[str]) -> Iterator[list[nn.Parameter]]:
        trained = [self.parameters[name] for name in names]
        for parameter in trained:
            parameter.requires_grad_(True)
        try:
            yield trained
        finally:
            for parameter in trained:
                parameter.requires_grad_(False)

    def _look(self) -> None:
        """Run once to find whether it works in place, its multiply-accumulates and its temporary memory."""
        copies = self._each(Tensor.clone)
        versions = {place: tensor._version for place, tensor in copies.items()}
        with _counter() as counter, self._meter(copies) as meter:
            output = self._run(copies)
            self.scratch = meter.peak - meter.live
        del output
        self.macs = counter.get_total_flops() // 2
        self.in_place = any(tensor._version > versions[place] for place, tensor in copies.items())

    def _measured_once(self, of_inputs: bool, trained: list[nn.Parameter], output_map: int) -> Timed:
        """Run both passes once, untimed, and measure their memory."""
        leaves, handed = self._replacements(of_inputs)
        with self._meter(handed) as meter:
            output, kept = self._recorded(handed, output_map)
            forward_scratch = meter.peak - meter.live
        outputs = _with_gradient(output)
        if not outputs:
            return Timed(0.0, forward_scratch=forward_scratch)
        upper = [torch.ones_like(v) for v in outputs]
        for tensor in upper:
            meter.add(tensor)
        meter.peak = started = meter.live
        with meter, _counter() as counter:  # not in the forward pass: its hooks on layers fail in ``grad``
            found = torch.autograd.grad(outputs, [*leaves.values(), *trained], upper, allow_unused=True)
        above = {storage_id(tensor) for tensor in upper}
        made = [g for g in found if g is not None and storage_id(g) not in above]
        new = {storage_id(gradient): gradient.untyped_storage().nbytes() for gradient in made}
        return Timed(
            forward=0.0,
            kept=kept,
            forward_scratch=forward_scratch,
            backward_scratch=max(meter.peak - started - sum(new.values()), 0),
            handed=frozenset(
                argument
                for argument, gradient in zip(leaves, found, strict=False)
                if gradient is not None and storage_id(gradient) in above
            ),
            passed=True,
            macs=counter.get_total_flops() // 2,
        )

    def _seconds(self, of_inputs: bool, trained: list[nn.Parameter]) -> tuple[float, float]:
        """Seconds of both passes; the untimed run before was the first, which does not count."""
        forward, backward = [0.0], [0.0]
        while not enough(backward):
            leaves, handed = self._replacements(of_inputs)
            output, seconds = timed(partial(self._run, handed), self.device)
            forward.append(seconds)
            outputs = _with_gradient(output)
            upper = [torch.ones_like(v) for v in outputs]
            call = partial(torch.autograd.grad, outputs, [*leaves.values(), *trained], upper, allow_unused=True)
            backward.append(timed(call, self.device)[1])
        return typical(forward), typical(backward)

    def _meter(self, handed: Mapping[int, Tensor]) -> LiveBytes:
        """A counter of bytes other than those of the operator's arguments, of any shapes."""
        read = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        return LiveBytes((*read, *handed.values(), *self.parameters.values()))

    def _copies(self) -> dict[int, Tensor]:
        return self._each(Tensor.clone) if self.in_place else {}

    def _each(self, function: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
        """The arguments with feature maps (B, ...) replaced; one that is read twice stays one, for attention."""
        tensors = {id(self.leaves[place]): self.leaves[place] for place in self.places}
        changed = {key: function(tensor) for key, tensor in tensors.items()}
        return {place: changed[id(self.leaves[place])] for place in self.places}

    def _replacements(self, of_inputs: bool) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Feature maps (B, ...) with gradients, by the argument's identity, and the replacements that are passed in."""
        leaves: dict[int, Tensor] = {}

        def fresh(tensor: Tensor) -> Tensor:
            leaf = leaves[id(tensor)] = tensor.detach().requires_grad_(of_inputs)
            return leaf.clone() if self.in_place else leaf

        handed = self._each(fresh)
        return leaves if of_inputs else {}, handed

    def _recorded(self, handed: dict[int, Tensor], output_map: int) -> tuple[Any, Kept]:
        """Run it on these feature maps (B, ...); returns its output and what autograd saves."""
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if storage_id(tensor) not in self.held and tensor.numel():
                kept[storage_id(tensor)] = tensor.detach()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = self._run(handed)
        numbers = {storage_id(t): self.maps[id(self.leaves[place])] for place, t in handed.items()}
        numbers |= {storage_id(value): output_map for value in _with_gradient(output)}
        return output, {
            key: _saved_view(tensor, numbers.get(key))
            for key, tensor in kept.items()
            if key in numbers or not (tensor.is_floating_point() and tensor.numel() in self.constants)
        }

    def _run(self, handed: Mapping[int, Tensor]) -> Any:
        leaves = [handed.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.call(args, kwargs)


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
"""The attention kernel that the counter does not know."""
_counter = partial(FlopCounterMode, display=False, custom_mapping=_ATTENTION)


def _saved_view(tensor: Tensor, number: int | None) -> SavedTensor:
    """The part of a storage that autograd saves through this view, of any shape."""
    whole = tensor.untyped_storage()
    if number is not None:
        return SavedTensor(number, whole.nbytes())
    values = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(whole)
    return SavedTensor(None, whole.nbytes(), float(values.sum(dtype=torch.float64)))


def _with_gradient(output: Any) -> list[Tensor]:
    return [value for value in tree_iter(output) if isinstance(value, Tensor) and value.requires_grad]


def enough(times: list[float]) -> bool:
    """Whether an operator was timed often enough; the first run does not count."""
    return len(times) > (LONG_REPEATS if len(times) > 1 and min(times[1:]) > LONG_SECONDS else REPEATS)


def typical(times: list[float]) -> float:
    """Median seconds of all runs except the first, which generates kernels."""
    return float(np.median(times[1:] or times))


def timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return a function's result, and the seconds that it would take on a machine without other work.

    With one thread on a processor these are processor seconds. A GPU has a clock of its own.
    """
    if (found := device_at_rest(device)) is not None:
        results: list[Any] = []
        seconds = found.memory.seconds(lambda: results.append(function()))
        return results.pop(), seconds
    worked = time.process_time()
    with on_own_core(), Stopwatch() as stopwatch:
        result = function()
    worked = time.process_time() - worked
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return result, worked if alone else stopwatch.quiet
