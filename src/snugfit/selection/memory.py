"""Peak bytes of a training step with a selection of tensors, followed through the operators of a profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from snugfit.core.tensors import OperatorFacts, Saved
from snugfit.selection.network import Mask, Network


def step_bytes(network: Network, mask: Mask, *, holds_gradients: bool = False) -> int:
    """Peak bytes of the maps and gradients of one forward and backward pass; weights and optimizer state not counted.

    Args:
        network: the profiled network, at its batch.
        mask: the tensors that train, (N,) bool.
        holds_gradients: whether gradients of weights accumulate over micro-batches, instead of being applied and freed
            one by one.
    """
    trains = np.zeros(len(network.operators), dtype=bool)
    trains[network.place[mask]] = True
    passes, flows = network._passes(trains)
    step = _Step(network, mask, holds_gradients)
    kept = [step.kept(index, bool(passes[index])) for index in range(len(network.operators))]
    step.forward(kept)
    step.backward(kept, passes, flows)
    return step.peak


class _Step:
    """Which bytes are alive while a step goes through its operators."""

    def __init__(self, network: Network, mask: Mask, holds_gradients: bool) -> None:
        self.network, self.mask, self.holds_gradients = network, mask, holds_gradients
        self.live = self.peak = 0
        self.sizes = _map_bytes(network)
        self.users: Counter[int] = Counter()
        self.of: list[list[int]] = [[] for _ in network.operators]
        for tensor, operator in enumerate(network.place):
            self.of[operator].append(tensor)

    def kept(self, index: int, passed: bool) -> dict[int, int]:
        """Maps that an operator keeps for its backward pass, with their bytes."""
        operator = self.network.operators[index]
        found: dict[int, int] = {}
        wanted: list[Saved] = list(operator.saved) if passed else []
        for tensor in self.of[index]:
            if self.mask[tensor]:
                wanted += self.network.tensors[tensor].saved
        for saved in wanted:
            found[saved.map] = saved.bytes * self.network.batch
        return found

    def forward(self, kept: list[dict[int, int]]) -> None:
        """Maps come alive where they are given, and die after their last reader unless they are kept."""
        operators = self.network.operators
        last = _last_readers(operators)
        self._hold(0, self.sizes[0])
        self.users[0] += 1  # the batch stays in the caller's hands
        given = {0}
        for index, operator in enumerate(operators):
            if operator.map not in given:  # in place, or a view, it gives a map that is there
                self._hold(operator.map, operator.output_bytes * self.network.batch)
                given.add(operator.map)
            for number, size in kept[index].items():
                self._hold(number, size)
            for number in [m for m, reader in last.items() if reader == index]:
                self._let_go(number)

    def backward(self, kept: list[dict[int, int]], passes: np.ndarray, flows: np.ndarray) -> None:
        """Gradients of maps come alive at their readers and die at their givers; those of weights are applied."""
        operators, gradients = self.network.operators, {}
        if operators:
            gradients[len(operators) - 1] = operators[-1].output_bytes * self.network.batch
            self._add(gradients[len(operators) - 1])
        for index in range(len(operators) - 1, -1, -1):
            if not flows[index]:
                continue
            for source in operators[index].inputs if passes[index] else ():
                if source >= 0 and flows[source] and source not in gradients:
                    gradients[source] = operators[source].output_bytes * self.network.batch
                    self._add(gradients[source])
            self._apply(index)
            for number in kept[index]:
                self._let_go(number)
            self.live -= gradients.pop(index, 0)

    def _apply(self, index: int) -> None:
        """Gradients of an operator's weights: one after the other through the optimizer, or held."""
        sizes = [self.network.tensors[tensor].bytes for tensor in self.of[index] if self.mask[tensor]]
        self._add(sum(sizes))
        if not self.holds_gradients:
            self.live -= sum(sizes)

    def _hold(self, number: int, size: int) -> None:
        self.users[number] += 1
        if self.users[number] == 1:
            self.sizes[number] = size
            self._add(size)

    def _let_go(self, number: int) -> None:
        self.users[number] -= 1
        if self.users[number] == 0:
            self.live -= self.sizes[number]

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


def _map_bytes(network: Network) -> dict[int, int]:
    """Bytes of every map that an operator gives; the input's is told by what keeps or reads it first."""
    sizes = {operator.map: operator.output_bytes * network.batch for operator in network.operators}
    kept = [s for operator in network.operators for t in operator.tensors for s in t.saved if s.map == 0]
    kept += [s for operator in network.operators for s in operator.saved if s.map == 0]
    sizes[0] = max((s.bytes for s in kept), default=0) * network.batch
    return sizes


def _last_readers(operators: Sequence[OperatorFacts]) -> dict[int, int]:
    """Per map, the number of the last operator that reads or gives it; the network's output has no reader."""
    last: dict[int, int] = {}
    for index, operator in enumerate(operators):
        for source in operator.inputs:
            last[operators[source].map if source >= 0 else 0] = index
        last.setdefault(operator.map, index)
    if operators:
        last.pop(operators[-1].map, None)
    return last
