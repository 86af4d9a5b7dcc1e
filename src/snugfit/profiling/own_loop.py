"""Seconds of every tensor of a network, for your own training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from snugfit._chain import Chain, classifier_names
from snugfit._core.profile import TensorProfile
from snugfit.errors import ModelError
from snugfit.memory import Baseline, MemoryLimit
from snugfit.profiling.tensors import TensorProbe, WholeStep


def time_tensors(chain: Chain, optimizer: torch.optim.Optimizer, batch: int) -> TensorProfile:
    """Measure the time of training each tensor on this machine (ElasticTrainer, sections 3.2 and 5).

    Operators and whole steps run on copies, with synthetic images and in each layer's current mode; the network, its
    statistics and the optimizer do not change. It takes some seconds, and memory for two copies of the weights.

    >>> import torch
    >>> from torch import nn
    >>> from snugfit import Chain
    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> profile = time_tensors(Chain.from_module(model, (1, 8, 8)), optimizer, batch=4)
    >>> [tensor.name for tensor in profile.tensors]
    ['0.weight', '0.bias', '3.weight', '3.bias']
    >>> all(tensor.seconds > 0 for tensor in profile.tensors)
    True

    Args:
        chain: the network, whose weights are in memory (``Chain.from_module(model, input_shape)``).
        optimizer: of the network; only its class and its defaults are used.
        batch: number of images (B, C, H, W) of a timed step; large feature maps are timed in smaller batches.

    Returns:
        Operators and tensors in order of execution, only those that currently require a gradient.

    Raises:
        ModelError: an operator cannot be run alone, or memory is refused for a step of one image.
    """
    state = chain.to_module().state_dict()
    device = next(iter(state.values())).device

    def prepare(module: nn.Module) -> None:
        module.load_state_dict({name: state[name] for name in module.state_dict()})

    def make_update(parameter: nn.Parameter) -> Callable[[], object]:
        return _replacements(optimizer, [parameter]).step

    make_steps = partial(_whole_steps, chain, optimizer)
    probe = TensorProbe("tensors", chain, str(device), prepare, make_update, lambda _: nullcontext(), make_steps, batch)
    found = probe.measure(MemoryLimit(None, Baseline(0, 0), device))
    if found is None:
        raise ModelError(f"memory is refused for a step of one image of {chain.input_shape}; free some first.")
    return found


def _replacements(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    kind: Any = type(optimizer)
    made: torch.optim.Optimizer = kind([{**optimizer.defaults, "params": parameters}])
    return made


def _whole_steps(chain: Chain, optimizer: torch.optim.Optimizer, batch: int) -> Sequence[WholeStep]:
    """Steps of a copy: with the trained tensors, twice (it is its own baseline), and with the classifier alone."""
    network = copy.deepcopy(chain)
    module, head = network.to_module(), set(classifier_names(chain))
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    updates = _replacements(optimizer, list(trained.values()))
    device = next(module.parameters()).device
    images = torch.randn(batch, *chain.input_shape, device=device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)

    def turn(everything: bool) -> None:
        updates.zero_grad()
        for name, parameter in trained.items():
            parameter.requires_grad_(everything or name in head)

    def step() -> None:
        nn.functional.cross_entropy(module(images), labels).backward()
        updates.step()
        updates.zero_grad()

    return [(partial(turn, everything), step) for everything in (True, True, False)]
