"""Peak bytes of live tensors in a step, counted exactly on any device, including the meta device.

torch's own MemTracker counts the same bytes, but keeps the parameters of tracked modules in memory after it has
finished (its hooks hold them), which a run inside a budget cannot afford, and takes 1-2 seconds to import.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from snugfit import _meta_device
from snugfit._upstream import hidden_bytes

_left_out: dict[int, weakref.ref[Any]] = {}

Kind = Literal["parameters", "buffers", "gradients", "optimizer_state", "batch", "activations", "temporaries"]
"""What the memory of a step is for. Temporaries are everything else: gradients of feature maps, results that no
backward pass needs, copies and counted workspace."""


def exclude_storage(storage: torch.UntypedStorage) -> None:
    """Exclude a storage from all counts, because it is a mapped file. Call it before anything else sees the storage."""
    key = storage._cdata
    _left_out[key] = weakref.ref(storage, lambda _: _left_out.pop(key, None))


@dataclass
class LiveStorage:
    """A storage that is alive, its bytes, and what it is for."""

    reference: weakref.ref[Any]
    bytes: int
    kind: Kind = "temporaries"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage from its allocation until it is freed, except mapped files."""

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        """Start with existing tensors of any shape, which count."""
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, LiveStorage] = {}
        for tensor in there:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Count an existing tensor of any shape."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or key in _left_out:
            return
        self._seen[key] = LiveStorage(weakref.ref(storage, lambda _: self._drop(key, size)), size)
        self.live += size
        self.reach(self.live)

    def reach(self, size: int) -> None:
        """So many bytes are alive."""
        self.peak = max(self.peak, size)

    def _drop(self, key: int, size: int) -> None:
        del self._seen[key]
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = _meta_device.run(func, args, kwargs or {})
        self.reach(self.live + hidden_bytes(func, args))
        self._add_outputs(outputs)
        return outputs

    def _add_outputs(self, outputs: Any) -> None:
        if isinstance(outputs, Tensor):
            self.add(outputs)
        elif isinstance(outputs, (list, tuple)):
            for output in outputs:
                self._add_outputs(output)


def storage_id(tensor: Tensor) -> int:
    """Identity of the memory that a tensor of any shape is a view of."""
    return int(tensor.untyped_storage()._cdata)


def tensor_peak_bytes(
    step: Callable[[], object],
    tracked: Iterable[nn.Module | Tensor] = (),
    repeats: int = 1,
    prepare: Callable[[], object] | None = None,
) -> int:
    """Run ``step`` and return the peak bytes of live tensors, of any shapes.

    On the meta device nothing is allocated or computed, so that the floor of a network that would never fit is known
    without running it. Workspace inside an operator is not a tensor and does not count.

    Args:
        step: called without arguments; the tensors that it allocates are counted.
        tracked: existing modules and tensors that are alive during the step.
        repeats: number of calls; from the second one on there is optimizer state.
        prepare: called first; the tensors that it leaves count, and not its own peak.
    """
    counter = LiveBytes()
    for item in tracked:
        tensors = [item] if isinstance(item, Tensor) else chain(item.parameters(), item.buffers())
        for tensor in tensors:
            counter.add(tensor)
    with counter:
        if prepare is not None:
            prepare()
            counter.peak = counter.live
        for _ in range(repeats):
            step()
    return counter.peak


def saved_bytes(forward: Callable[[], object], held: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd saves for the backward pass of ``forward``.

    Each storage counts once. Those of ``held``, of any shapes, do not count.
    """
    known = {storage_id(tensor) for tensor in held}
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(sizes.values())
