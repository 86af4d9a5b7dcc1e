"""The forward pass of a network some of whose modules run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from snugfit._training.network import Forward
from snugfit.errors import ModelError
from snugfit.memory.autocast import autocast_for_recomputation

Around = Callable[..., Any]
"""Computes a call from the module's name, its forward pass, and the arguments."""


@contextmanager
def _frozen_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let norms normalise as in training without updating their statistics: the first forward pass has updated them.

    The buffers are still passed, with momentum 0, since recomputation must save the same tensors as the first pass.
    """
    norms = [m for module in modules for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    settings = [(norm.momentum, norm._buffers["num_batches_tracked"]) for norm in norms]
    for norm in norms:
        norm.momentum, norm._buffers["num_batches_tracked"] = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, settings, strict=True):
            norm.momentum, norm._buffers["num_batches_tracked"] = momentum, tracked


def contexts(modules: Sequence[nn.Module]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first forward pass of modules and of the recomputation."""
    return nullcontext(), _recomputing(modules, autocast_for_recomputation())


@contextmanager
def _recomputing(modules: Sequence[nn.Module], precision: AbstractContextManager[object]) -> Iterator[None]:
    with precision, _frozen_statistics(modules):
        yield


@contextmanager
def calls_through(modules: Mapping[str, nn.Module], around: Around) -> Iterator[None]:
    """Let ``around(name, forward, *args, **kwargs)`` compute each call of modules, given by name.

    Hooks of such a module run outside of that, as its forward pass does not include them.
    """
    before = {module: vars(module).get("forward") for module in modules.values()}
    for name, module in modules.items():
        module.forward = partial(around, name, module.forward)
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward
            else:
                module.forward = own


def recomputing_calls(network: nn.Module, names: Sequence[str]) -> Forward:
    """The forward pass of a network in which each call of the named modules is a checkpoint of torch's.

    A call within such a call runs as usual.

    Raises:
        ModelError: the network has no such module.
    """
    known = dict(network.named_modules())
    if unknown := [name for name in names if name not in known]:
        raise ModelError(f"{type(network).__name__} has no module '{unknown[0]}', which the plan computes again.")
    modules, inside = {name: known[name] for name in names}, False

    def run_again(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return forward(*args, **kwargs)
        inside = True
        try:
            own = partial(contexts, [modules[name]])
            return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=own)
        finally:
            inside = False

    def run(values: Tensor) -> Tensor:
        with calls_through(modules, run_again):
            result: Tensor = network(values)
        return result

    return run
