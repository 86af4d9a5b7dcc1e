"""The Tensor Timing Profiler: the time of each operator's backward pass for each output mask, measured here.

ElasticTrainer sections 3.2 and 5. Every operator runs alone on the outputs of earlier ones: its forward pass without
gradients, with a gradient that passes to its inputs, with one for each of its tensors, and with one for all of them. No
assumption is made about layers: a norm is the black box of section 5.2, and a layer without tensors (section 5.3) and
attention are operators like any other.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_iter

from snugfit._chain import Chain
from snugfit._core.profile import OperatorStats, Saved, Scratch, StepSeconds, TensorProfile, TensorStats
from snugfit.errors import MEMORY_ERRORS, ModelError, first_line
from snugfit.memory import MemoryLimit, is_out_of_memory, release_memory
from snugfit.memory.device import has_own_memory
from snugfit.memory.process import PageMapping
from snugfit.memory.tensors import storage_id
from snugfit.profiling.description import describe_node
from snugfit.profiling.operator import Kept, KernelContext, Operator, SavedTensor, Timed, Times, enough, timed, typical

MAP_BYTES = 32_000_000
"""Largest feature map that is timed; an operator takes about four times as much memory."""
DEVICE_MAP_BYTES = 512_000_000
"""The same on a device with a memory of its own. Steps of few images wait there for the host, which takes the same time
for any number: on an H200, 9 images of ResNet-50 made it look as if no selection took half of a full step's time."""
T = TypeVar("T")
WholeStep = tuple[Callable[[], object], Callable[[], object]]
"""Prepares a network for a training step, untimed; and runs the step."""
_MakeUpdate = Callable[[nn.Parameter], Callable[[], object]]


@dataclass(frozen=True)
class TensorProbe:
    """A network whose operators and tensors a strategy must know individually.

    Attributes:
        name: for the event after its measurement.
        chain: the network, on the meta device.
        device: of the measurement.
        prepare: sets weights, operators and modes of a unit's module in memory.
        make_update: builds a function that applies the gradient of a parameter.
        context: returns the autocast context for a batch.
        make_steps: builds the network in memory for a batch size, and three pairs of functions: one prepares it, the
            other runs a training step, which is timed. They are the three of ``StepSeconds``, in its order.
        batch_limit: largest batch of interest.
        live: whether the chain's own modules are measured, which are in memory and do not change; ``prepare`` then sets
            no weights, and updates are not timed.
        same: the computation as text; see :class:`snugfit.profiling.Probe`.
    """

    name: str
    chain: Chain
    device: str
    prepare: Callable[[nn.Module], object]
    make_update: _MakeUpdate
    context: Callable[[Tensor], AbstractContextManager[object]]
    make_steps: Callable[[int], Sequence[WholeStep]]
    batch_limit: int
    live: bool = False
    same: str = ""

    def measure(self, limit: MemoryLimit) -> TensorProfile | None:
        """Measure every operator on (B, ...); at half the batch if memory is refused, None if one sample is too much.

        Raises:
            ModelError: an operator cannot be run alone.
        """
        started = time.perf_counter()
        found = self.measure_operators(limit)
        if found is None:
            return None
        tries = 7 if has_own_memory(self.device) else 2  # a first batch that is larger may have to be halved more often
        steps = _at_falling_batches(partial(self._steps, limit), found.batch, tries)
        return replace(found, steps=steps, seconds=time.perf_counter() - started)

    def measure_operators(self, limit: MemoryLimit) -> TensorProfile | None:
        """As :meth:`measure` on (B, ...), without whole steps: one unit in memory at a time."""
        return _at_falling_batches(partial(self._operators, limit), self._first_batch())

    def _first_batch(self) -> int:
        shapes = [shape for unit in self.chain.all_units for shape in (unit.output_shape, unit.map_shape)]
        largest = max(torch.Size(shape).numel() for shape in shapes)
        most = DEVICE_MAP_BYTES if has_own_memory(self.device) else MAP_BYTES
        return max(1, min(self.batch_limit, most // (4 * largest)))

    def _steps(self, limit: MemoryLimit, batch: int) -> StepSeconds:
        """Time whole steps in turns, so that other work on the machine affects all of them equally."""
        with limit.allow_kernels():
            steps = self.make_steps(batch)
        times, mapping = [list[float]() for _ in steps], 0.0
        while not all(map(enough, times)):
            for (ready, step), seconds in zip(steps, times, strict=True):
                ready()
                before = PageMapping.so_far()
                with nullcontext() if seconds else limit.allow_kernels():
                    seconds.append(timed(step, torch.device(self.device))[1])
                mapping += PageMapping.so_far().since(before).seconds
        stock, full, head = map(typical, times)
        return StepSeconds(batch, stock, full, head, min(mapping / sum(map(sum, times)), 1.0))

    def _operators(self, limit: MemoryLimit, batch: int) -> TensorProfile:
        value = torch.randn((batch, *self.chain.input_shape), device=self.device)
        if value.dim() == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        input_bytes, found = value.untyped_storage().nbytes() // batch, _Found(batch)
        for unit in self.chain.all_units:
            module = unit.module if self.live else copy.deepcopy(unit.module).to_empty(device=self.device)
            self.prepare(module)
            timer = _UnitTimer(module, found, None if self.live else self.make_update, limit.allow_kernels)
            with self.context(value), timer:
                value = timer.run(value)
        return TensorProfile(batch, tuple(found.operators), input_bytes=input_bytes)


def _at_falling_batches(measure: Callable[[int], T], batch: int, tries: int = 64) -> T | None:
    """Measure at a batch, at half of it if memory is refused, and so on; None if all were refused."""
    while batch and tries:
        tries -= 1
        try:
            return measure(batch)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
        release_memory()
        batch //= 2
    return None


@dataclass
class _Found:
    """Results so far: the operators, the number of feature maps, and the operator whose output enters the next unit.

    ``times`` are those of operators by their computation as text, ``updates`` the seconds of updates by shape.
    """

    batch: int
    operators: list[OperatorStats] = field(default_factory=list)
    maps: int = 0
    entry: tuple[int, int] = (-1, 0)
    times: dict[str, Times] = field(default_factory=dict)
    updates: dict[tuple[int, ...], float] = field(default_factory=dict)

    def new_map(self) -> int:
        self.maps += 1
        return self.maps

    def saved(self, kept: Kept, inside: dict[SavedTensor, int]) -> tuple[Saved, ...]:
        """Bytes per sample of the saved tensors, of any shape, that grow with the batch; extends ``inside``."""
        found = []
        for one in kept.values():
            if one.bytes >= self.batch:
                if one.map is None and one not in inside:
                    inside[one] = self.new_map()
                found.append(Saved(inside[one] if one.map is None else one.map, one.bytes // self.batch))
        return tuple(found)


class _UnitTimer(fx.Interpreter):
    """Runs a unit's graph node by node, each node many times, and records its measurements."""

    def __init__(
        self, module: fx.GraphModule, found: _Found, make_update: _MakeUpdate | None, kernels: KernelContext
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors get our own messages
        self.found, self.make_update, self.kernels = found, make_update, kernels
        self.values: dict[fx.Node, tuple[int, int]] = {}
        self.entry = found.entry[0]
        self.trains = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        self.held = {storage_id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        module.requires_grad_(False)

    def __enter__(self) -> _UnitTimer:
        return self

    def __exit__(self, *error: object) -> None:
        """Restore ``requires_grad`` of the parameters."""
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(self.trains[name])

    def run_node(self, n: fx.Node) -> Any:
        """Measure one node; returns its output."""
        if n.op == "placeholder":
            self.values[n] = self.found.entry
        if n.op == "output" and isinstance(n.args[0], fx.Node):
            self.found.entry = self.values[n.args[0]]
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        arguments = self.fetch_args_kwargs_from_env(n)
        call = partial(getattr(self, n.op), n.target)
        operator = Operator(
            call, arguments, self._maps(n), self._parameters(n), self.held, self._constants(n), self.kernels
        )
        operator.times = self.found.times.setdefault(self._computation(n, operator), operator.times)
        if not operator.places and not operator.parameters:
            return call(*arguments)
        try:
            return self._note(n, operator)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason, name = first_line(error).rstrip("."), n.target if n.op == "call_module" else n.name
            raise ModelError(
                f"{name} ({self._kind(n)}) cannot be timed alone: {reason}. Train this model with another strategy."
            ) from error

    def _computation(self, node: fx.Node, operator: Operator) -> str:
        """What a node computes, in which mode, on which shapes; operators with equal texts cost the same."""
        owner = self.module.get_submodule(str(node.target)) if node.op == "call_module" else nn.Identity()
        modes = [module.training for module in owner.modules()]
        given = [
            (tuple(leaf.shape), leaf.stride(), leaf.dtype, place in operator.places)
            if isinstance(leaf, Tensor)
            else leaf
            for place, leaf in enumerate(operator.leaves)
        ]
        trained = [tuple(parameter.shape) for parameter in operator.parameters.values()]
        return f"{describe_node(self.module, node)} {modes} {given} {trained}"

    def _sources(self, node: fx.Node) -> Iterator[tuple[fx.Node, Tensor]]:
        for source in node.all_input_nodes:
            if source in self.values:
                for value in tree_iter(self.env[source]):
                    if isinstance(value, Tensor) and value.is_floating_point():
                        yield source, value

    def _maps(self, node: fx.Node) -> dict[int, int]:
        """Number of each feature map that a node reads, by the tensor's identity."""
        return {id(value): self.values[source][1] for source, value in self._sources(node)}

    def _parameters(self, node: fx.Node) -> dict[str, nn.Parameter]:
        """Trainable parameters that a node reads, by name in the model."""
        direct = [source for source in node.all_input_nodes if source.op == "get_attr"]
        named = {str(s.target): value for s in direct if isinstance(value := self.env[s], nn.Parameter)}
        if node.op == "call_module":
            owned = self.module.get_submodule(str(node.target)).named_parameters()
            named |= {f"{node.target}.{name}": parameter for name, parameter in owned}
        seen = {tensor.name for operator in self.found.operators for tensor in operator.tensors}
        twice = next((name for name in named if name in seen), None)
        if twice is not None:
            raise ModelError(f"{twice} is read by two operators, so its time cannot be measured. Use another strategy.")
        return {name: parameter for name, parameter in named.items() if self.trains[name]}

    def _constants(self, node: fx.Node) -> list[Tensor]:
        """Weights and buffers, in their shapes, that a node reads."""
        found = [value for s in node.all_input_nodes if s.op == "get_attr" and isinstance(value := self.env[s], Tensor)]
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            found += [*module.parameters(), *module.buffers()]
        return found

    def _kind(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return type(self.module.get_submodule(str(node.target))).__name__
        return str(getattr(node.target, "__name__", node.target))

    def _note(self, node: fx.Node, operator: Operator) -> Any:
        output, forward = operator.forward()
        tensors = [value for value in tree_iter(output) if isinstance(value, Tensor) and value.is_floating_point()]
        if not tensors:
            return output
        given = self._map_of(tensors[0], operator)
        passing = operator.gradient(of_inputs=True, of=(), output_map=given) if operator.places else None
        sources = [(self.values[source][0], id(value)) for source, value in self._sources(node)]
        batch, inside = self.found.batch, dict[SavedTensor, int]()
        stats = OperatorStats(
            name=str(node.target if node.op == "call_module" else node.name),
            kind=self._kind(node),
            inputs=tuple(dict.fromkeys(number for number, _ in sources)),
            map=given,
            output_bytes=sum(value.numel() * value.element_size() for value in tensors) // batch,
            forward_seconds=forward,
            pass_seconds=max(passing.forward - forward, 0.0) + passing.backward if passing else 0.0,
            macs=operator.macs // batch,
            saved=self.found.saved(passing.kept, inside) if passing else (),
            tensors=self._tensors(operator, forward, passing, given, inside),
            entry=self.entry,
            handed=tuple(dict.fromkeys(n for n, value in sources if passing and value in passing.handed)),
            scratch=Scratch(
                operator.scratch // batch,
                (passing.forward_scratch if passing else operator.scratch) // batch,
                passing.backward_scratch // batch if passing else 0,
            ),
        )
        self.found.operators.append(stats)
        self.values[node] = (len(self.found.operators) - 1, given)
        return output

    def _map_of(self, output: Tensor, operator: Operator) -> int:
        """Number of the feature map (B, ...) that an operator returns: its input's for in-place operators and views."""
        numbers = operator.numbers
        if operator.in_place:
            return next(iter(numbers.values()))
        return numbers[storage_id(output)] if storage_id(output) in numbers else self.found.new_map()

    def _tensors(
        self, operator: Operator, forward: float, passing: Timed | None, given: int, inside: dict[SavedTensor, int]
    ) -> tuple[TensorStats, ...]:
        """Measure each tensor, of any shape, alone, then all together, which bounds their sum."""
        names = tuple(operator.parameters)
        alone = {name: operator.gradient(of_inputs=False, of=(name,), output_map=given) for name in names}
        seconds = {name: max(one.forward - forward, 0.0) + one.backward for name, one in alone.items()}
        if len(names) > 1:
            whole = operator.gradient(of_inputs=True, of=names, output_map=given)
            passed = passing.forward + passing.backward if passing else forward
            together = max(whole.forward + whole.backward - passed, *seconds.values())
            share = min(together / max(sum(seconds.values()), 1e-9), 1.0)
            seconds = {name: value * share for name, value in seconds.items()}
        return tuple(
            TensorStats(
                name=name,
                parameters=parameter.numel(),
                bytes=parameter.numel() * parameter.element_size(),
                seconds=seconds[name],
                update_seconds=self._update_seconds(parameter),
                macs=self._macs(operator, name) // self.found.batch,
                saved=self.found.saved(alone[name].kept, inside),
                scratch_bytes=alone[name].backward_scratch // self.found.batch,
            )
            for name, parameter in operator.parameters.items()
        )

    def _macs(self, operator: Operator, name: str) -> int:
        """Multiply-accumulates of a tensor's gradient: the operator's, or its share if there are several matrices."""
        matrices = [each for each, parameter in operator.parameters.items() if parameter.dim() > 1]
        if name not in matrices:
            return 0
        if len(matrices) == 1:
            return operator.macs
        others = [each for each in matrices if each != name]
        return operator.backward_macs(matrices) - operator.backward_macs(others)

    def _update_seconds(self, parameter: nn.Parameter) -> float:
        if self.make_update is None:
            return 0.0
        if (known := self.found.updates.get(tuple(parameter.shape))) is not None:
            return known
        parameter.requires_grad_(True)
        update = self.make_update(parameter)
        times: list[float] = []
        while not enough(times):
            parameter.grad = torch.zeros_like(parameter)
            times.append(timed(update, parameter.device)[1])
        parameter.grad = None
        parameter.requires_grad_(False)
        self.found.updates[tuple(parameter.shape)] = typical(times)
        return typical(times)
