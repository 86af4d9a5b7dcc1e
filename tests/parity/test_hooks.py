"""Layers with hooks and parametrizations train as in the loop that anyone would write, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import assert_same, train_plainly
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import snugfit
from snugfit._chain import Chain
from snugfit._core.registry import strategies, strategy_class
from snugfit._core.workload import Workload
from snugfit.errors import ModelError

OPTIONS: dict[str, Any] = {"epochs": 1, "max_train": 64, "max_val": 20, "image_size": 16, "batch_size": 32, "seed": 3}
ON_LAYER: dict[str, Callable[[nn.Module], object]] = {
    "a parametrization": parametrizations.weight_norm,
    "a parametrization with state": parametrizations.spectral_norm,
    "a forward hook": lambda layer: layer.register_forward_hook(lambda module, given, output: output * 3),
    "a forward pre-hook": lambda layer: layer.register_forward_pre_hook(lambda module, given: (given[0] * 3,)),
    "a backward hook": lambda layer: layer.register_full_backward_hook(lambda module, to, of: (to[0] * 3,)),
    "a backward pre-hook": lambda layer: layer.register_full_backward_pre_hook(lambda module, of: (of[0] * 3,)),
}


def network(change: Callable[[nn.Module], object] = lambda layer: None, place: str = "2") -> nn.Module:
    """Two convolutions that can be tiled, a container, and a head; one of its modules changed."""
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    change(made.get_submodule(place))
    return made


def train(folder: Path, kind: str, strategy: str) -> dict[str, torch.Tensor]:
    made = network(ON_LAYER[kind])
    snugfit.plan(made, "digits", strategy=strategy, schedule="constant", **OPTIONS).run((), out=folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", ON_LAYER)
def test_backprop_honours_what_layers_have(tmp_path: Path, kind: str) -> None:
    made = network(ON_LAYER[kind]).train()
    plain = train_plainly(made, OPTIONS, epochs=1)
    assert_same(plain, train(tmp_path / "run", kind, "backprop"), tolerance=1e-6)
    without = train_plainly(network().train(), OPTIONS, epochs=1)
    if "hook" in kind:  # it makes a difference
        assert not torch.allclose(without["0.weight"], plain["0.weight"], rtol=1e-5, atol=1e-5)


def test_recomputation_honours_a_parametrization_without_state(tmp_path: Path) -> None:
    plain = train_plainly(network(ON_LAYER["a parametrization"]).train(), OPTIONS, epochs=1)
    assert_same(plain, train(tmp_path / "run", "a parametrization", "checkpoint"), tolerance=1e-6)


def reasons(strategy: str, made: nn.Module) -> list[str]:
    workload = Workload(
        "net", "data", (1, 16, 16), 10, train_count=64, val_count=20, test_count=20, epochs=1, batch_size=32,
        batch_limit=32,
    )  # fmt: skip
    found: list[str] = strategy_class(strategy)().validate(workload, Chain.from_module(made, (1, 16, 16)), None)
    return found


@pytest.mark.parametrize("kind", ON_LAYER)
@pytest.mark.parametrize("strategy", sorted(set(strategies()) - {"backprop"}))
def test_every_other_strategy_refuses_it_by_name(strategy: str, kind: str) -> None:
    if (strategy, kind) == ("checkpoint", "a parametrization"):
        pytest.skip("honoured")
    first = next(iter(reasons(strategy, network(ON_LAYER[kind]))), "")
    assert first.startswith(f"{kind.removesuffix(' with state')} of layer '2' would be bypassed")


@pytest.mark.parametrize("strategy", sorted(strategies()))
def test_a_global_hook_is_refused_where_layers_are_bypassed(strategy: str) -> None:
    handle = register_module_forward_hook(lambda module, given, output: None)
    try:
        found = [reason for reason in reasons(strategy, network()) if "global module hook" in reason]
    finally:
        handle.remove()
    assert len(found) == (0 if strategy == "backprop" else 1)
    assert not any("hook" in reason for reason in reasons(strategy, network()))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize(
    ("write", "instead"),
    [
        (weight_norm, "torch.nn.utils.parametrizations.weight_norm"),
        (spectral_norm, "torch.nn.utils.parametrizations.spectral_norm"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "a parametrization that multiplies by the mask"),
    ],
)
def test_weights_written_by_hooks_are_refused_with_their_replacement(write: Callable[..., Any], instead: str) -> None:
    with pytest.raises(ModelError, match=rf"'2' writes its weight.* use {instead}"):
        Chain.from_module(network(write), (1, 16, 16))


@pytest.mark.parametrize("kind", [kind for kind in ON_LAYER if "hook" in kind])
@pytest.mark.parametrize(("place", "text"), [("5", "'5' (Sequential)"), ("", "the model (Sequential)")])
def test_hooks_that_tracing_would_lose_are_refused(place: str, text: str, kind: str) -> None:
    with pytest.raises(ModelError) as raised:
        Chain.from_module(network(ON_LAYER[kind], place), (1, 16, 16))
    assert f"{kind} of {text} would be lost" in str(raised.value)


def test_a_hook_of_a_parameter_is_refused() -> None:
    made = network()
    made.get_parameter("2.weight").register_hook(lambda gradient: gradient * 3)
    with pytest.raises(ModelError, match=r"a hook of parameter '2.weight' would be lost"):
        Chain.from_module(made, (1, 16, 16))
