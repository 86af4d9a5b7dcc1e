"""The chain: a network as units in order and a head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._chain.cuts import NodeSpan, cut
from snugfit._chain.hooks import bypassed_hooks, require_kept_hooks, require_kept_weights, uncalled
from snugfit._chain.initialise import parameter_owners, share_parameter_dicts
from snugfit._chain.inputs import taking_one_tensor
from snugfit._chain.propagation import (
    BATCH,
    changed_buffers,
    needs_values,
    node_shapes,
    read_batch_size_locally,
    reads_batch_size,
    reason_against_second_pass,
)
from snugfit._chain.subgraph import copy_nodes
from snugfit._chain.tracing import IndivisibleError, Traced, assemble, attributes_of, own_buffers, trace
from snugfit._chain.unit import Unit, make_unit, run_failure
from snugfit._chain.whole import whole_unit
from snugfit._core.inputs import Input
from snugfit.errors import ModelError, first_line, is_out_of_memory


@dataclass
class Chain:
    """Units in order, then the head.

    >>> layers = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10)]
    >>> chain = Chain.from_module(nn.Sequential(*layers), (1, 16, 16))
    >>> [(unit.name, unit.output_shape) for unit in chain.all_units]
    [('0', (8, 14, 14)), ('2', (8, 12, 12)), ('5', (10,))]

    Attributes:
        name: the model's name.
        units: all units before the head.
        head: the last part, which ends in the classifier.
        input_shape: channels, height, width of one image.
        undivided: why the network has no units besides the head, which is the model itself; empty if it is divided.
        loss: loss of its outputs and their targets, if one was passed from Python.
        optimizer: makes the update rule of a parameter by its name, if an optimizer was passed from Python.
        inputs: what the network takes, if it is several inputs; their values are then one tensor.
        stores: attributes in which a forward pass of the model leaves feature maps, which units do not do.
    """

    name: str
    units: tuple[Unit, ...]
    head: Unit
    input_shape: tuple[int, ...]
    undivided: str = ""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    optimizer: Callable[[str, nn.Parameter], Any] | None = None
    inputs: tuple[Input, ...] = ()
    stores: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        """A copy with its own weights; the caller's loss and optimizer are shared."""
        shared = copy.copy(self)
        shared.units, shared.head = copy.deepcopy((self.units, self.head), memo)
        return shared

    @classmethod
    def from_any_module(
        cls, model: nn.Module, input_shape: tuple[int, int, int], name: str = "", inputs: Sequence[Input] = ()
    ) -> Chain:
        """Like :meth:`from_module`, but a network that cannot be divided is a chain without units.

        It can be trained as a whole. Its ``head`` is the model itself, which need not have a graph.

        Raises:
            ModelError: the model does not run on such an input, does not return one tensor, has no parameters, or has
                hooks of parameters or hooks that write weights.
        """
        try:
            _require_momentum(model)
            return cls.from_module(model, input_shape, name, inputs)
        except IndivisibleError as error:
            reason = error.reason
        name = name or type(model).__name__
        head = whole_unit(model, tuple(input_shape), name, inputs)
        return cls(name, (), head, tuple(input_shape), reason, inputs=tuple(inputs))

    @classmethod
    def from_module(
        cls, model: nn.Module, input_shape: tuple[int, int, int], name: str = "", inputs: Sequence[Input] = ()
    ) -> Chain:
        """Trace a model and cut it into units; parameters are shared with the model, without allocation.

        Args:
            model: maps (batch, *input_shape) to one tensor; on any device, including meta.
            input_shape: channels, height, width of one image.
            name: the class's name by default.
            inputs: what the model takes, if it is several; the chain takes their values as one tensor,
                (batch, 1, 1, N).

        Raises:
            ModelError: the model cannot be traced (the message says where), does not run on such an input, has tied
                weights, has hooks that would be lost, or has nothing to split. :meth:`from_any_module` accepts most
                of these.
        """
        kind = type(model).__name__
        name = name or kind
        require_kept_weights(model)
        traced = trace(model, inputs)
        require_kept_hooks(model, (str(node.target) for node in traced.graph.nodes if node.op == "call_module"))
        stored = set(model.state_dict())
        graph = assemble(traced.graph, traced.attributes, stored)
        try:
            traced.shapes = node_shapes(graph, input_shape)
            of_two_batches = node_shapes(graph, input_shape, 2 * BATCH) if reads_batch_size(traced.graph) else {}
            lost = _lost_changes(taking_one_tensor(model, inputs), graph, input_shape)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if needs_values(error):
                raise IndivisibleError(f"{kind} does not run on the meta device ({first_line(error)})") from error
            raise run_failure(name, input_shape, error, inputs) from error
        if traced.shapes[_output(traced.graph)] is None:
            raise ModelError(f"{name} must return one tensor; wrap it in a module that returns its logits.")
        if lost:
            raise IndivisibleError(
                f"{kind} changes the buffer '{lost[0]}' in its forward pass, which no traced chain can follow"
            )
        read_batch_size_locally(traced.graph, traced.shapes, of_two_batches)
        stretches = cut(traced, model)
        if not stretches:
            raise IndivisibleError(f"{kind} has no convolution or linear layer: nothing to train in units", ".")
        if len(stretches) == 1:
            raise IndivisibleError(f"{kind} has nothing to split: no single tensor crosses between two of its layers")
        units = _extract(traced, stretches, stored, tuple(input_shape))
        for unit in units:
            unit.module.training = model.training
            unit.owners.update(parameter_owners(unit.module, model))
        _adopt(units[-1].module, model, stored - _stored_names(units))
        _check_untied(units)
        return cls(name, tuple(units[:-1]), units[-1], tuple(input_shape), inputs=tuple(inputs), stores=traced.stores)

    @classmethod
    def from_units(
        cls,
        units: Sequence[tuple[str, nn.Module]],
        head: tuple[str, nn.Module],
        input_shape: tuple[int, ...],
        name: str = "",
    ) -> Chain:
        """Build a chain by hand, for models that cannot be traced.

        A unit's state-dict names are its name, a dot, and the module's own names. Name units by the path of their
        modules in the model (``("layer1", model.layer1)``); then the chain's weights load back into it.

        Raises:
            ModelError: names repeat or contain each other, a unit does not run on its predecessor's output, weights are
                shared, or there is no unit except the head.
        """
        parts = [*units, head]
        if not units:
            raise ModelError("a chain needs at least one unit before its head: nothing to split.")
        _check_names([part_name for part_name, _ in parts])
        made: list[Unit] = []
        shape = tuple(input_shape)
        for part_name, module in parts:
            graph = fx.Graph()
            graph.output(graph.call_module(part_name, (graph.placeholder("x"),)))
            made.append(make_unit(part_name, assemble(graph, {part_name: module}, set()), shape))
            shape = made[-1].output_shape
        _check_untied(made)
        return cls(name or "chain", tuple(made[:-1]), made[-1], tuple(input_shape))

    @property
    def all_units(self) -> tuple[Unit, ...]:
        """The units and the head."""
        return (*self.units, self.head)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(unit.parameters for unit in self.all_units)

    def reasons_against_units(self, *, recomputed: bool = False) -> list[str]:
        """Reasons against a strategy that works with units, or does not call every layer once in a step.

        The network cannot be divided; layers have hooks, of which one of each kind is named; or layers that are called
        twice change their buffers.

        Args:
            recomputed: whether layers are called unchanged, but twice; parametrizations without state are then allowed.
        """
        if self.undivided:
            kind = type(self.head.module).__name__
            return [f"needs units, and {kind} cannot be divided: {self.undivided}"]
        several = [] if recomputed or not self.inputs else ["needs a network of one input, and this one takes several"]
        reasons = several + bypassed_hooks((unit.module for unit in self.all_units), recomputed=recomputed)
        for unit in self.all_units if recomputed else ():
            if changed := changed_buffers(unit.module, unit.input_shape):
                reasons.append(f"the buffer '{changed[0]}' would change twice in a step; use backprop")
            elif reason := reason_against_second_pass(unit.module, unit.input_shape):
                reasons.append(f"{unit.name} {reason}, which would differ when it runs again; use backprop")
        return reasons

    def uncalled_modules(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules of the chain's model, by name, that no unit calls: their hooks run only while it is traced."""
        if self.undivided:
            return []
        nodes = (node for unit in self.all_units for node in unit.module.graph.nodes)
        return uncalled(model, (str(node.target) for node in nodes if node.op == "call_module"))

    def reasons_against_freezing(self) -> list[str]:
        """Reasons against a strategy that freezes parts, or trains on images that only measure: changing buffers."""
        units = () if self.undivided else self.all_units
        changed = next((found for each in units for found in changed_buffers(each.module, each.input_shape)), None)
        if changed is None:
            return []
        return [f"the buffer '{changed}' changes in every forward pass, and frozen parts must not; use backprop"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the head's output from (batch, *input_shape), as the model does."""
        for unit in self.all_units:
            x = unit.module(x)
        return x

    __call__ = forward

    def merged(self, sizes: Sequence[int]) -> Chain:
        """A chain of fewer units, each of which joins consecutive ones; layers, weights and their names are shared.

        Args:
            sizes: units of this chain in each unit of the new one; they sum to the number of units.

        Raises:
            ValueError: the sizes are not positive, or do not sum to the number of units.
        """
        if sum(sizes) != len(self.units) or min(sizes, default=0) < 1:
            raise ValueError(f"sizes {tuple(sizes)} do not divide {len(self.units)} units")
        ends = list(accumulate(sizes))
        parts = (self.units[end - size : end] for end, size in zip(ends, sizes, strict=True))
        merged = tuple(_merge(part) for part in parts)
        made = copy.copy(self)
        made.units = merged
        return made

    def to_module(self) -> nn.Module:
        """One plain module that computes the same and shares the parameters; its state-dict names are the model's.

        That of a network that cannot be divided is the model itself, or its copy on the meta device.

        Moving or emptying its weights also does so in the units, and vice versa; except for weights that belong to no
        layer and whose module is read by several units.
        """
        if self.undivided:
            return self.head.module
        graph, attributes = _joined(self.all_units)
        stored = _stored_names(self.all_units)
        module = assemble(graph, attributes, stored)
        _adopt(module, self.head.module, stored - set(module.state_dict()))
        share_parameter_dicts(module, [unit.module for unit in self.all_units])
        module.training = self.head.module.training
        return module


def _joined(units: Sequence[Unit]) -> tuple[fx.Graph, dict[str, Any]]:
    """The graph of units one after another, and what its nodes refer to."""
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    value: Any = graph.placeholder("x")
    for unit in units:
        placeholder = next(iter(unit.module.graph.nodes))
        value = graph.graph_copy(unit.module.graph, {placeholder: value})
        attributes.update(attributes_of(unit.module))
    graph.output(value)
    return graph, attributes


def _require_momentum(model: nn.Module) -> None:
    """Refuse norms that average over all batches: they read their count, and plans run units on the meta device."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.momentum is None and module.track_running_stats:
            raise IndivisibleError(f"'{name}' has momentum=None, whose share of a batch is a value of its count")


def _merge(units: Sequence[Unit]) -> Unit:
    """One unit that computes what consecutive units compute; a single one is itself."""
    first, last = units[0], units[-1]
    if len(units) == 1:
        return first
    graph, attributes = _joined(units)
    module = assemble(graph, attributes, _stored_names(units))
    share_parameter_dicts(module, [unit.module for unit in units])
    module.training = last.module.training
    convs = tuple(conv for unit in units for conv in unit.convs)
    owners = {name: owner for unit in units for name, owner in unit.owners.items()}
    name = f"{first.name}..{last.name}"
    return Unit(name, module, first.input_shape, last.output_shape, convs, last.map_shape, owners)


def classifier_names(chain: Chain) -> tuple[str, ...]:
    """Names of the tensors of the network's last layer with any: the classifier, retrained for other classes."""
    module = chain.head.module
    for node in reversed(module.graph.nodes):
        if node.op == "call_module":
            tensors = {
                f"{node.target}.{name}": each for name, each in attrgetter(node.target)(module).named_parameters()
            }
        else:
            direct = (str(source.target) for source in node.all_input_nodes if source.op == "get_attr")
            tensors = {name: attrgetter(name)(module) for name in direct}
        names = [name for name, each in tensors.items() if isinstance(each, nn.Parameter) and each.requires_grad]
        if names:
            return tuple(names)
    return ()


def _output(graph: fx.Graph) -> fx.Node:
    return cast(fx.Node, next(node for node in graph.nodes if node.op == "output"))


def _extract(traced: Traced, stretches: list[NodeSpan], stored: set[str], input_shape: tuple[int, ...]) -> list[Unit]:
    units: list[Unit] = []
    crossing = next(iter(traced.graph.nodes))
    final = cast(fx.Node, _output(traced.graph).args[0])
    for stretch in stretches:
        last = final if stretch is stretches[-1] else stretch.nodes[-1]
        module = assemble(copy_nodes(stretch.nodes, crossing, last), traced.attributes, stored)
        units.append(make_unit(stretch.name, module, units[-1].output_shape if units else input_shape))
        crossing = last
    return units


def _lost_changes(model: nn.Module, graph: fx.GraphModule, input_shape: tuple[int, ...]) -> list[str]:
    """Names of buffers that a model changes, and its graph does not: tracing ran Python once, and saw no change."""
    if not any(own_buffers(model)):
        return []
    kept = changed_buffers(graph, input_shape)
    return [name for name in changed_buffers(model, input_shape) if name not in kept]


def _adopt(module: fx.GraphModule, source: nn.Module, names: set[str]) -> None:
    """Add the layers that ``forward`` never calls to a module, so that the state-dict names stay the model's."""
    for owner in sorted({name.rpartition(".")[0] for name in names}):
        layer = source.get_submodule(owner)
        if not owner or any(f"{owner}.{key}" not in names for key in layer.state_dict()):
            unused = next(name for name in sorted(names) if name.rpartition(".")[0] == owner)
            raise IndivisibleError(f"parameter {unused} is never used in forward", "; remove it from the model.")
        module.add_submodule(owner, layer)


def _stored_names(units: Sequence[Unit]) -> set[str]:
    return {name for unit in units for name in unit.module.state_dict()}


def _check_untied(units: Sequence[Unit]) -> None:
    """Check that no tensor is stored under two names or in two units."""
    places: dict[int, str] = {}
    for unit in units:
        for key, tensor in unit.module.state_dict(keep_vars=True).items():
            place = f"{key} (unit {unit.name})"
            if places.setdefault(id(tensor), place) != place:
                raise IndivisibleError(
                    f"tied weights: {places[id(tensor)]} and {place} are one tensor",
                    ". Units train and are stored separately; give each its own.",
                )


def _check_names(names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        for other in names[:index]:
            if f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                raise ModelError(f"unit names '{other}' and '{name}' repeat or lie within each other; rename one.")
