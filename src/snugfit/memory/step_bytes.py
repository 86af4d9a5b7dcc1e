"""What the memory of a step is for at its peak, and in which layer that is; for any module, traced or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn

from snugfit.memory.tensors import Kind, LiveBytes, LiveStorage, storage_id

LOSS, UPDATE = "loss", "update"
"""Names of what runs outside of all layers: the loss, and the optimizer after the backward pass."""


class StepBytes(LiveBytes):
    """Counts as :class:`LiveBytes`, and says what every byte at the peak is for.

    Backward passes belong to the layer that saved what they read. A gradient or activation counts as such from its
    allocation on, because kinds are added up at the end.

    Attributes:
        layer: name of the innermost module that is running, or ``LOSS`` or ``UPDATE``.
        backward: whether that is in its backward pass.
        marked: bytes of every kind but temporaries, each storage once; of images, activations and gradients those since
            :meth:`restart`.
    """

    def __init__(self, module: nn.Module) -> None:
        """Start with the parameters and buffers of a module, whose layers are to be named."""
        super().__init__()
        self.module, self.layer, self.backward = module, LOSS, False
        self.marked: Counter[Kind] = Counter()
        self._at_peak: tuple[list[LiveStorage], str, bool] = ([], LOSS, False)
        for parameter in module.parameters():
            self.mark(parameter, "parameters")
        for buffer in module.buffers():
            self.mark(buffer, "buffers")

    def mark(self, tensor: Tensor, kind: Kind) -> None:
        """Say what a tensor of any shape is for; what it was marked as before stays."""
        self.add(tensor)
        found = self._seen[storage_id(tensor)]
        if found.kind == "temporaries":
            found.kind = kind
            self.marked[kind] += found.bytes

    def reach(self, size: int) -> None:
        """So many bytes are alive; at a new peak, note which."""
        if size > self.peak:
            self.peak, self._at_peak = size, (list(self._seen.values()), self.layer, self.backward)

    def restart(self) -> None:
        """Forget the peak of earlier steps."""
        self.peak = 0
        for kind in ("batch", "activations", "gradients"):
            del self.marked[kind]
        self.reach(self.live)

    def enter(self, layer: str) -> None:
        """What runs from here on, outside of all layers."""
        self.layer, self.backward = layer, False

    @property
    def peak_layer(self) -> str:
        """Where the peak is."""
        return self._at_peak[1]

    @property
    def peak_backward(self) -> bool:
        """Whether the peak is in a backward pass."""
        return self._at_peak[2]

    def bytes_at_peak(self) -> dict[Kind, int]:
        """Bytes of every kind at the peak; their sum is the peak. Workspace that is no tensor is temporary."""
        sums: Counter[Kind] = Counter()
        for each in self._at_peak[0]:
            sums[each.kind] += each.bytes
        sums["temporaries"] += self.peak - sum(sums.values())
        return {kind: sums[kind] for kind in get_args(Kind)}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Count what runs meanwhile, and follow it through the layers of the module."""
        handles: list[Any] = []
        outer: list[str] = []

        def entering(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any) -> None:
                outer.append(self.layer)
                self.enter(name)

            return hook

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self.enter(outer.pop())

        for name, layer in self.module.named_modules():
            handles.append(layer.register_forward_pre_hook(entering(name or type(layer).__name__)))
            handles.append(layer.register_forward_hook(leave))
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._note_gradient))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, self._load), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.mark(parameter.grad, "gradients")

    def _save(self, tensor: Tensor) -> tuple[str, Tensor]:
        self.mark(tensor, "activations")
        return self.layer, tensor

    def _load(self, saved: tuple[str, Tensor]) -> Tensor:
        self.layer, self.backward = saved[0], True
        return saved[1]
