"""Symbolic tracing of a user's model into one torch.fx graph that is valid in training and in evaluation mode."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from snugfit._chain.inputs import pack_inputs
from snugfit._chain.python_state import attributes_kept
from snugfit._chain.random_numbers import random_numbers_watched
from snugfit._core.inputs import Input
from snugfit.errors import ModelError, first_line, is_out_of_memory

LAYERS = (_ConvNd, nn.Linear)
"""Layers with weights that make consecutive nodes a unit."""

_ATOMIC = (*LAYERS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_DROPOUTS: dict[Any, type[nn.Module]] = {
    F.dropout: nn.Dropout,
    torch.dropout: nn.Dropout,
    F.dropout1d: nn.Dropout1d,
    F.dropout2d: nn.Dropout2d,
    F.dropout3d: nn.Dropout3d,
    F.alpha_dropout: nn.AlphaDropout,
    F.feature_alpha_dropout: nn.FeatureAlphaDropout,
}
SPLIT_BY_HAND = "Split it by hand with Chain.from_units."

_Found = tuple[fx.Graph, dict[str, Any], tuple[str, ...]]


class IndivisibleError(ModelError):
    """A network cannot be divided into units; ``reason`` says why, as a clause."""

    def __init__(self, reason: str, advice: str = f". {SPLIT_BY_HAND}") -> None:
        super().__init__(f"{reason}{advice}")
        self.reason = reason


@dataclass
class Traced:
    """A traced model.

    ``attributes`` are the objects that the graph's targets refer to; shared with the model, never copied. ``shapes``
    are set by propagation: of each node's value with its batch axis, None if it is not a tensor. ``stores`` names
    attributes in which a forward pass of the model leaves feature maps, which the graph does not do.
    """

    graph: fx.Graph
    attributes: dict[Any, Any]
    shapes: dict[fx.Node, tuple[int, ...] | None] = field(default_factory=dict)
    stores: tuple[str, ...] = ()


def trace(model: nn.Module, inputs: Sequence[Input] = ()) -> Traced:
    """Trace a model that takes one tensor, or several ``inputs`` that are packed into one, and returns one.

    Modules whose ``forward`` reads ``self.training`` stay whole, and functional dropout becomes a module, so that
    the graph follows ``train()`` and ``eval()``.

    Raises:
        IndivisibleError: the control flow depends on data or, in the outermost module, on ``self.training``; or the
            model does what a graph would not repeat: it overrides ``train``, changes autograd's mode or autocast, or
            draws random numbers of its own.
        ModelError: it takes several inputs.
    """
    parameters = list(inspect.signature(type(model).forward).parameters.values())[1:]
    taken = _taken(parameters, inputs)
    others = [each for each in parameters if each.name not in taken]
    defaults = {each.name: each.default for each in others if each.default is not each.empty}
    for each in others:
        if each.name not in defaults and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise _several_inputs(model, each.name)
    with _buffers_kept(model):
        graph, constants, stores = _graph(model, defaults)
    _require_plain_modes(model, {str(node.target) for node in graph.nodes if node.op == "call_module"})
    _drop_other_inputs(model, graph, taken)
    if inputs:
        placeholders = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
        pack_inputs(graph, inputs, [placeholders[name] for name in taken])
    traced = _finish(model, graph, constants)
    traced.stores = stores
    return traced


def _graph(model: nn.Module, defaults: dict[str, Any]) -> _Found:
    """The graph, tensors by name that are constants of it, and attributes in which feature maps are stored.

    Constants may be computed of buffers, and have no values on the meta device. Then this is part of the graph, unless
    Python needs a size of a buffer.
    """
    found = _graph_of(model, defaults, with_buffers=False)
    if found[1]:
        with contextlib.suppress(IndivisibleError):
            return _graph_of(model, defaults, with_buffers=True)
    return found


def _graph_of(model: nn.Module, defaults: dict[str, Any], *, with_buffers: bool) -> _Found:
    whole: set[str] = set()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    while True:
        seen: set[str] = set()
        error: Exception | None = None
        with (
            _watched_training(model, seen),
            _watched_autocast() as autocasts,
            random_numbers_watched() as drew,
            attributes_kept(model) as before,
        ):
            try:
                graph = _Tracer(whole, with_buffers, parameters).trace(model, concrete_args=defaults)
                seen |= _flags_in_arguments(graph)
            except Exception as raised:
                if is_out_of_memory(raised):
                    raise
                error = raised
            constants = {key: value for key, value in vars(model).items() if key not in before}
            stores = _stored_maps(model)
            constants = {key: value for key, value in constants.items() if key not in stores}
        if "" in seen:
            raise IndivisibleError(
                f"{type(model).__name__}.forward takes another path in training mode, which no traced chain can follow"
            )
        if error is not None and not seen:
            raise IndivisibleError(
                f"{type(model).__name__} cannot be traced: {first_line(error)} ({_location(error)})"
            ) from error
        if not seen and autocasts:
            raise IndivisibleError(f"{type(model).__name__}.forward changes autocast, which a traced chain would not")
        if not seen and drew():
            kind = type(model).__name__
            raise IndivisibleError(f"{kind}.forward draws random numbers, which a traced chain would draw once")
        if not seen:
            return graph, constants, stores
        whole |= seen


def _stored_maps(model: nn.Module) -> tuple[str, ...]:
    """The attributes of layers in which tracing has left feature maps."""
    return tuple(
        f"{name}.{key}".lstrip(".")
        for name, layer in model.named_modules()
        for key, value in vars(layer).items()
        if any(isinstance(each, fx.Proxy) for each in tree_leaves(value))
    )


def _require_plain_modes(model: nn.Module, called: set[str]) -> None:
    """Refuse modules whose ``train`` is their own, unless they are called as a whole.

    A graph replaces the others, so that nothing calls their ``train``, by which fine-tuning keeps norms in evaluation
    mode.
    """
    for name, module in model.named_modules():
        own = type(module).train is not nn.Module.train or "train" in vars(module)
        if own and not is_torch_class(module) and not any(f"{name}.".startswith(f"{each}.") for each in called):
            owner = f"'{name}'" if name else "the model"
            raise IndivisibleError(f"{type(module).__name__}.train of {owner} is overridden, which no unit calls")


def assemble(graph: fx.Graph, attributes: dict[str, Any], persistent: set[str]) -> fx.GraphModule:
    """Build a module from a graph; its state-dict names are the targets' own names.

    Tensors that are neither parameters nor in ``persistent`` stay out of its state dict.
    """
    module = fx.GraphModule(attributes, graph, class_name="Unit")
    for node in graph.nodes:
        if node.op == "get_attr" and node.target not in persistent:
            owner, _, name = node.target.rpartition(".")
            value = attributes[node.target]
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                module.get_submodule(owner).register_buffer(name, value, persistent=False)
    return module


def attributes_of(module: fx.GraphModule, graph: fx.Graph | None = None) -> dict[str, Any]:
    """The objects that the targets of a module's graph, or of another made from it, refer to."""
    nodes = [node for node in (graph or module.graph).nodes if node.op in ("call_module", "get_attr")]
    return {node.target: attrgetter(node.target)(module) for node in nodes}


def owner_of(node: fx.Node) -> str:
    """Qualified name of the module whose ``forward`` a node comes from (``""`` is the model)."""
    if node.op == "call_module":
        return str(node.target).rpartition(".")[0]
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


def path_of(node: fx.Node) -> str:
    """Qualified name of the layer that a node calls, or of the module whose ``forward`` it comes from."""
    return str(node.target) if node.op == "call_module" else owner_of(node)


class _TrainingFlag(int):
    """Replaces ``module.training`` during tracing and records when Python branches on it."""

    owner: str
    seen: set[str]

    def __bool__(self) -> bool:
        self.seen.add(self.owner)
        return int(self) != 0


class _Tracer(fx.Tracer):
    """Modules named in ``whole`` stay whole; ``with_buffers``, what is computed of buffers is part of the graph.

    ``parameters`` are the names of all parameters.
    """

    def __init__(self, whole: set[str], with_buffers: bool, parameters: set[str]) -> None:
        super().__init__()
        self.whole, self.proxy_buffer_attributes = whole, with_buffers
        self._modes, self._parameters, self._trained = _modes(), parameters, set[fx.Node]()

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *others: Any, **options: Any) -> fx.Node:
        """Refuse to leave gradients out, as ``no_grad`` does, where any parameter would get one."""
        node: fx.Node = super().create_node(kind, target, args, kwargs, *others, **options)
        if kind == "call_module":
            trained = any(True for _ in self.root.get_submodule(str(target)).parameters())
        else:
            trained = kind == "get_attr" and str(target) in self._parameters
        if trained or not self._trained.isdisjoint(node.all_input_nodes):
            self._trained.add(node)
            if kind.startswith("call") and _modes() != self._modes:
                raise RuntimeError("it runs layers under no_grad, which a graph does not keep")
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self.whole
            or isinstance(m, _ATOMIC)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def create_arg(self, a: Any) -> Any:
        return a if isinstance(a, _TrainingFlag) else super().create_arg(a)


def _modes() -> tuple[bool, bool]:
    """What contexts in a forward pass change of autograd."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@contextlib.contextmanager
def _watched_autocast() -> Iterator[list[object]]:
    """Contexts of autocast that are entered meanwhile, even those that disable it."""
    entered: list[object] = []
    enter = torch.autocast.__enter__

    def note(context: Any) -> Any:
        entered.append(context)
        return enter(context)

    torch.autocast.__enter__ = note  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


@contextlib.contextmanager
def _watched_training(model: nn.Module, seen: set[str]) -> Iterator[None]:
    modules = {name: module for name, module in model.named_modules() if not is_torch_class(module)}
    modes = {name: module.training for name, module in modules.items()}
    try:
        for name, module in modules.items():
            flag = _TrainingFlag(modes[name])
            flag.owner, flag.seen = name, seen
            module.__dict__["training"] = flag
        yield
    finally:
        for name, module in modules.items():
            module.training = modes[name]


def own_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Buffers, of any shapes, of layers whose class is not torch's, with these layers and their names in them."""
    for module in model.modules():
        if not is_torch_class(module):
            yield from ((module, name, buffer) for name, buffer in module.named_buffers(recurse=False))


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Undo what a forward pass in the context does to buffers; torch's own layers are not called while tracing."""
    before = [(module, name, buffer, buffer.clone()) for module, name, buffer in own_buffers(model)]
    versions = [buffer._version for _, _, buffer, _ in before]
    try:
        yield
    finally:
        for (module, name, buffer, values), version in zip(before, versions, strict=True):
            if buffer._version != version:
                buffer.copy_(values)
            module._buffers[name] = buffer


def is_torch_class(module: nn.Module) -> bool:
    """Whether the module's class is torch's own, not a custom one."""
    return type(module).__module__.startswith("torch.nn.")


def _flags_in_arguments(graph: fx.Graph) -> set[str]:
    """Modules that pass ``self.training`` to anything except dropout."""
    owners: set[str] = set()

    def note(value: Any) -> Any:
        if isinstance(value, _TrainingFlag):
            owners.add(value.owner)
        return value

    for node in graph.nodes:
        if node.target not in _DROPOUTS:
            map_aggregate((node.args, node.kwargs), note)
    return owners


def _finish(model: nn.Module, graph: fx.Graph, constants: dict[str, Any]) -> Traced:
    attributes = _dropouts_as_modules(graph)
    for node in graph.nodes:
        if node.op == "call_module" and node.target not in attributes:
            attributes[node.target] = model.get_submodule(node.target)
        elif node.op == "get_attr":
            name = node.target.rpartition(".")[2]
            attributes[node.target] = constants[name] if name in constants else attrgetter(node.target)(model)
    return Traced(graph, attributes)


def _taken(parameters: Sequence[inspect.Parameter], inputs: Sequence[Input]) -> list[str]:
    """Names of the parameters of a forward pass that get the inputs; the first one without ``inputs``."""
    plain = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if len(inputs) > len(plain) or any(each.name and each.name not in plain for each in inputs):
        raise IndivisibleError("its forward pass takes several inputs, and lists other ones")
    return [each.name or plain[index] for index, each in enumerate(inputs)] or plain[:1]


def _drop_other_inputs(model: nn.Module, graph: fx.Graph, taken: Sequence[str]) -> None:
    """Remove the inputs besides those ``taken``, which are fixed to their defaults, and the assertions that fx adds."""
    for placeholder in [node for node in graph.nodes if node.op == "placeholder" and node.target not in taken]:
        for user in list(placeholder.users):
            checks = list(user.users) or [user]  # of a flag or number: whether it equals its default
            if any(each.users or "_assert" not in str(each.target) for each in checks):
                raise IndivisibleError(
                    f"{type(model).__name__}.forward computes with {placeholder.target}, which tracing does not fix to "
                    "its default"
                )
            for each in dict.fromkeys([*checks, user]):
                graph.erase_node(each)
        graph.erase_node(placeholder)


def _several_inputs(model: nn.Module, name: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__}.forward takes more than one input ({name}). Train it as a whole, on items "
        f"((a, b), label); see snugfit.from_dataset. {SPLIT_BY_HAND}"
    )


def _dropouts_as_modules(graph: fx.Graph) -> dict[str, nn.Module]:
    """Replace functional dropout that follows ``self.training`` by modules, in place."""
    modules: dict[str, nn.Module] = {}
    for node in list(graph.nodes):
        if node.target not in _DROPOUTS:
            continue
        values = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
        training = values.get("training", values.get("train"))
        if not isinstance(training, _TrainingFlag):
            continue
        module = _DROPOUTS[node.target](values.get("p", 0.5), inplace=bool(values.get("inplace", False)))
        module.train(int(training) != 0)
        target = ".".join(filter(None, [training.owner, f"functional_dropout_{len(modules)}"]))
        with graph.inserting_before(node):
            replacement = graph.call_module(target, (values["input"],))
        replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
        modules[target] = module
    return modules


def _location(error: Exception) -> str:
    """File, line and function of the user's code in which tracing failed."""
    skipped = (str(Path(torch.__file__).parent), __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(skipped)]
    frames = [f for f in frames if not f.filename.startswith("<")] or frames
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "no line known"
