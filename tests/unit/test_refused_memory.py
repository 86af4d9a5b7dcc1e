"""Refused memory is never taken for a fault of the model or of its weights, wherever it is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from snugfit._chain import Chain
from snugfit._models.external import from_callable
from snugfit._storage.tensor_file import read_weights
from snugfit.errors import is_out_of_memory
from snugfit.surgery import find_groups, side_positions

SHAPE = (3, 16, 16)


class CustomNorm(nn.BatchNorm2d):
    """No class of torch, so that it is also run in training mode, to see whether it works in place."""


def network() -> nn.Sequential:
    """Two units and a head."""
    layers = [nn.Conv2d(3, 8, 3, 2, 1), CustomNorm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), CustomNorm(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def traced() -> fx.GraphModule:
    """The network as a graph, in which a layer is one call."""
    return Chain.from_module(network(), SHAPE).to_module()


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "chain": lambda: partial(Chain.from_module, network(), SHAPE),
    "groups": lambda: partial(find_groups, traced(), SHAPE),
    "side positions": lambda: partial(side_positions, traced(), SHAPE),
}


@pytest.mark.parametrize("refusal", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("layer", [nn.Conv2d, nn.BatchNorm2d])
def test_at_every_call_of_a_layer(what, layer, refusal, monkeypatch):
    """Refuse the first call of a layer, then the second, until there are no more."""
    forward, refused = layer.forward, 0
    while True:
        left, called = refused, CALLS[what]()

        def call(self, x):
            nonlocal left
            left -= 1
            if left == -1:
                raise refusal
            return forward(self, x)

        with monkeypatch.context() as patched:
            patched.setattr(layer, "forward", call)
            try:
                called()
            except Exception as error:
                assert is_out_of_memory(error), f"{error!r} at call {refused}"
            else:
                break
        refused += 1
    assert refused >= 2


def test_while_a_network_is_traced():
    class Hungry(nn.Module):
        def forward(self, x):
            raise MemoryError

    with pytest.raises(MemoryError):
        Chain.from_module(Hungry(), SHAPE)


def test_in_a_function_of_the_user(monkeypatch, tmp_path):
    (tmp_path / "full_nets.py").write_text("def net(classes):\n    raise RuntimeError('not enough memory: 1 byte')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="not enough memory"):
        from_callable("full_nets:net", 3)


def test_while_weights_are_read(monkeypatch, tmp_path: Path):
    path = tmp_path / "weights.pth"
    torch.save({"weight": torch.ones(2)}, path)
    for refusal in (MemoryError(), RuntimeError("not enough memory: you tried to allocate 8 bytes")):

        def refuse(*_, error=refusal, **__):
            raise error

        monkeypatch.setattr(torch, "load", refuse)
        with pytest.raises(type(refusal)):
            read_weights(path)
