"""What calling a layer does in addition to computing its output: hooks, parametrizations and running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from snugfit._chain.tracing import IndivisibleError
from snugfit._upstream import has_global_hooks
from snugfit.errors import ModelError

_KINDS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
_RECOMPUTED_WEIGHTS = {
    "torch.nn.utils.weight_norm": "torch.nn.utils.parametrizations.weight_norm",
    "torch.nn.utils.spectral_norm": "torch.nn.utils.parametrizations.spectral_norm",
    "torch.nn.utils.prune": "a parametrization that multiplies by the mask",
}
"""Modules whose hooks write a weight before every call, and what to use instead."""


def require_kept_hooks(model: nn.Module, called: Iterable[str]) -> None:
    """Check that a traced chain loses no hook of a module.

    A chain calls the layers that its graph names. Hooks of other modules run only while the model is traced.

    Raises:
        IndivisibleError: a hook would be lost; the message names the module.
    """
    for name, module in uncalled(model, called):
        if kind := hook_of(module):
            owner = f"{repr(name) if name else 'the model'} ({type(module).__name__})"
            raise IndivisibleError(
                f"{kind} of {owner} would be lost, since only layers are called",
                "; register it on layers, or remove it.",
            )


def uncalled(model: nn.Module, called: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Modules, by name, that a graph which calls these layers does not call, nor any part of them."""
    whole = set(called)
    return [(name, module) for name, module in model.named_modules() if not _is_called(name, whole)]


def require_kept_weights(model: nn.Module) -> None:
    """Check that no hook writes a weight or belongs to a parameter, since parameters are replaced when loaded.

    Raises:
        ModelError: there is one, or a layer has sparse gradients; the message names the module or parameter.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(f"'{name}' has sparse gradients, which no optimizer here takes; set sparse=False.")
        bases = (base.__module__ for hook in module._forward_pre_hooks.values() for base in type(hook).__mro__)
        if writer := next((base for base in bases if base in _RECOMPUTED_WEIGHTS), None):
            raise ModelError(
                f"{writer} on '{name}' writes its weight in a hook, which no strategy can follow; use "
                f"{_RECOMPUTED_WEIGHTS[writer]} with --strategy backprop."
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ModelError(f"a hook of parameter '{name}' would be lost when the model is loaded; remove it.")


def bypassed_hooks(modules: Iterable[nn.Module], *, recomputed: bool = False) -> list[str]:
    """Reasons against a strategy that does not call every layer exactly once in a step, as plain training does.

    Tiles and lean operators compute a layer's output without calling it, units run separately, and recomputation calls
    a layer twice (``recomputed``; parametrizations without state are then allowed). A layer with a hook or a
    parametrization may then compute something else. The first such layer of each kind is named.
    """
    found: dict[str, str] = {}
    for name, kind in _seen(modules, recomputed):
        found.setdefault(kind, name)
    reasons = [
        f"{kind} of layer '{name}' would be bypassed; remove it, or use backprop" for kind, name in found.items()
    ]
    if has_global_hooks():
        reasons.append("a global module hook would be bypassed; remove it, or use backprop")
    return reasons


def _seen(modules: Iterable[nn.Module], recomputed: bool) -> Iterator[tuple[str, str]]:
    for outer in modules:
        for name, layer in outer.named_modules():
            if kind := hook_of(layer):
                yield name, kind
            if is_parametrized(layer):
                parametrizations: Any = layer.parametrizations
                if not recomputed or any(True for _ in parametrizations.buffers()):
                    yield name, "a parametrization"


def hook_of(module: nn.Module) -> str | None:
    """What kind of hook a module has; None without any."""
    return next((text for kind, text in _KINDS.items() if getattr(module, kind)), None)


def _is_called(name: str, called: set[str]) -> bool:
    """Whether a module, or one that contains it, is called directly."""
    parts = name.split(".")
    return any(".".join(parts[: count + 1]) in called for count in range(len(parts)))


def tracking_norms(module: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers of a module in training mode with running statistics, each once.

    >>> [type(norm).__name__ for norm in tracking_norms(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval()))]
    ['BatchNorm1d']
    """
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, _BatchNorm) and layer.training and layer.running_mean is not None
    ]
