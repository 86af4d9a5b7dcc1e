"""Shapes of a network's values, by running it on the meta device, and the batch size where they depend on it."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from snugfit._chain.python_state import attributes_kept, python_state
from snugfit._chain.random_numbers import random_numbers_kept, random_state
from snugfit._chain.tracing import is_torch_class
from snugfit._meta_device import CachedOperators

BATCH = 2
"""Images in the synthetic batch: in training mode BatchNorm refuses single values."""

Shapes = dict[fx.Node, tuple[int, ...] | None]
"""Shape of each node's value with its batch axis; None if it is not a tensor."""


def run_on_meta(
    module: nn.Module,
    input_shape: tuple[int, ...],
    training: bool,
    function: Callable[[torch.Tensor], Any] | None = None,
    batch: int = BATCH,
) -> tuple[Any, bool]:
    """Run a module, or a function that uses it, on a synthetic batch, without allocating or changing anything.

    Meta tensors replace parameters and buffers during the call. The batch has shape (B, *input_shape) and the first
    parameter's dtype. Returns the output, and whether the input was modified in place.
    """
    images = torch.empty((batch, *input_shape), dtype=_dtype(module), device="meta")
    tensors = chain(module.named_parameters(), module.named_buffers())
    stand_ins = {f"module.{name}": torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    unchanged = attributes_kept(module)
    with torch.no_grad(), random_numbers_kept(), unchanged, in_mode(module, training), CachedOperators():
        output = functional_call(Call(module, function or module), stand_ins, (images,))
    return output, images._version > 0


def changed_buffers(module: nn.Module, input_shape: tuple[int, ...]) -> list[str]:
    """Names of buffers that a pass in training mode changes, but of norms' statistics; none if it needs values."""
    found: list[str] = []

    def buffers() -> dict[str, torch.Tensor]:
        return {
            f"{owner}.{name}".lstrip("."): each
            for owner, layer in module.named_modules()
            if not isinstance(layer, _NormBase)
            for name, each in layer.named_buffers(recurse=False)
        }

    def run(images: torch.Tensor) -> None:
        """Run images (B, *input_shape) on stand-ins, which nothing has changed before."""
        before = buffers()
        module(images)
        found.extend(name for name, each in buffers().items() if each is not before.get(name) or each._version > 0)

    try:
        run_on_meta(module, input_shape, True, run)
    except Exception as error:
        if not needs_values(error):
            raise
    return found


def reason_against_second_pass(module: nn.Module, input_shape: tuple[int, ...]) -> str:
    """Why a module with layers of the user's own may not run twice in a step; empty if it may, or needs values."""
    if all(is_torch_class(layer) or isinstance(layer, fx.GraphModule) for layer in module.modules()):
        return ""
    found: list[str] = []

    def run(images: torch.Tensor) -> None:
        """Run images (B, *input_shape) twice, because attributes may be set in the first pass alone."""
        module(images)
        random, attributes = random_state(), python_state(module)
        module(images)
        if random_state() != random:
            found.append("draws random numbers of Python or numpy")
        elif python_state(module) != attributes:
            found.append("changes its attributes")

    try:
        run_on_meta(module, input_shape, True, run)
    except Exception as error:
        if not needs_values(error):
            raise
    return "".join(found)


def needs_values(error: Exception) -> bool:
    """Whether a pass failed because tensors on the meta device have no values, or met tensors that are elsewhere."""
    return "meta" in str(error).lower()


def run_for_real(module: nn.Module, input_shape: tuple[int, ...], training: bool) -> Any:
    """Run a module on random images (B, *input_shape), without changing its tensors.

    Buffers are copied. Tensors on the meta device get memory on the processor, and small random values. oneDNN is left
    out, because it generates kernels, which a memory limit must allow for.
    """
    with torch.no_grad(), random_numbers_kept(), in_mode(module, training), without_onednn():
        stand_ins = {f"module.{name}": _real(tensor) for name, tensor in module.named_parameters()}
        stand_ins |= {f"module.{name}": _real(tensor).clone() for name, tensor in module.named_buffers()}
        device = next(iter(stand_ins.values())).device
        images = torch.randn((BATCH, *input_shape), dtype=_dtype(module), device=device)
        return functional_call(Call(module, module), stand_ins, (images,))


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Compute without oneDNN, whose kernels take memory that a limit must allow for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the precision, which the flags set to what it is
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of any shape, or if it has no memory, a new one that neither overflows nor is an invalid index."""
    if not tensor.is_meta:
        return tensor
    made = torch.zeros_like(tensor, device="cpu")
    return made.normal_(std=0.02).abs_() if tensor.is_floating_point() else made


def _dtype(module: nn.Module) -> torch.dtype | None:
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)


def node_shapes(module: fx.GraphModule, input_shape: tuple[int, ...], batch: int = BATCH) -> Shapes:
    """Shapes of all values in a graph, in evaluation mode."""
    interpreter = _ShapeInterpreter(module)
    run_on_meta(module, input_shape, False, interpreter.run, batch)
    return interpreter.shapes


class _ShapeInterpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: Shapes = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.shapes[n] = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        return value


class Call(nn.Module):
    """Calls a function on behalf of a module, whose tensors ``functional_call`` finds as ``module.…``."""

    def __init__(self, module: nn.Module, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.module = module
        self.__dict__["function"] = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.__dict__["function"](x)


@contextlib.contextmanager
def in_mode(module: nn.Module, training: bool = False) -> Iterator[None]:
    """Put a module into training or evaluation mode, then restore the mode of every layer."""
    modes = {part: part.training for part in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def reads_batch_size(graph: fx.Graph) -> bool:
    """Whether a graph has ``x.size(0)`` or ``x.shape[0]``."""
    return any(map(_is_batch_size, graph.nodes))


def read_batch_size_locally(graph: fx.Graph, shapes: Shapes, of_two_batches: Shapes) -> None:
    """Let every user of ``x.size(0)`` or ``x.shape[0]`` read the size of its own input instead; in place.

    An input has a batch axis first if this grows with the batch: ``of_two_batches`` are the shapes at twice as many
    images.
    """
    for node in list(graph.nodes):
        if not _is_batch_size(node):
            continue
        for user in list(node.users):
            tensor = user.args[0] if user.args else None
            if not isinstance(tensor, fx.Node) or (of_two_batches.get(tensor) or ())[:1] != (2 * BATCH,):
                continue
            if (shapes.get(tensor) or ())[:1] != (BATCH,):
                continue
            with graph.inserting_before(user):
                size = graph.call_method("size", (tensor, 0))
            size.meta = dict(user.meta)
            shapes[size] = None
            user.replace_input_with(node, size)
    for node in reversed(list(graph.nodes)):
        if not node.users and (_is_batch_size(node) or _is_shape(node)):
            graph.erase_node(node)


def _is_shape(node: fx.Node) -> bool:
    """Whether a node is ``x.shape``, ``x.size()``, or an item of one of them."""
    if node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_shape(source)
    if node.op == "call_function":
        return node.target is getattr and node.args[1] == "shape"
    return node.op == "call_method" and node.target == "size" and len(node.args) == 1


def _is_batch_size(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    while isinstance(source, fx.Node) and _is_shape(source):
        source = source.args[0]
    if isinstance(source, fx.Node) and source.op == "get_attr":  # the size of a buffer
        return False
    if node.op == "call_method" and node.target == "size":
        return bool(node.args[1:] == (0,))
    if node.op == "call_function" and node.target is operator.getitem:
        return _is_shape(node) and bool(node.args[1] == 0)
    return False
