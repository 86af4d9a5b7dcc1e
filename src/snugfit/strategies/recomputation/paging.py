"""What autograd saves for the backward pass, on disk in the meantime."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from snugfit.lean.saved_tensors import Layout, memory_order
from snugfit.memory.paging import BLOCK_BYTES, BLOCKS, Page, PageFile
from snugfit.memory.tensors import storage_id

SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay in memory."""


class PagedTensor:
    """A saved tensor of any shape whose values are on disk; once they are read, in memory until all uses have had them.

    Args:
        tensor: the tensor.
        page: its bytes; None on the meta device.
    """

    def __init__(self, tensor: Tensor, page: Page | None) -> None:
        self.layout, self.page, self.uses = Layout.of(tensor), page, 0
        self.storage = weakref.ref(tensor.untyped_storage())
        self._found: Tensor | None = None

    def read(self, file: PageFile) -> Tensor:
        """The values, of the shape and in the layout that they had, for one use."""
        found = self._found
        if found is None:
            found = self.layout.empty()
            if self.page is not None:
                file.read(self.page, _bytes(found))
        self.uses -= 1
        self._found = found if self.uses > 0 else None
        return found


class Pager:
    """Moves saved tensors to a page file and back. Tensors on the meta device are made again, without a file.

    Args:
        file: the page file.
        modules: their weights and buffers stay in memory.

    Attributes:
        bytes: of all tensors that were moved so far.
    """

    def __init__(self, file: PageFile, modules: Iterable[nn.Module]) -> None:
        self.file, self.bytes, self._modules = file, 0, list(modules)
        self._blocks: Tensor | None = None
        self._resident: set[int] = set()
        self._shapes: set[torch.Size] = set()
        self._paged: weakref.WeakValueDictionary[tuple[object, ...], PagedTensor] = weakref.WeakValueDictionary()

    @contextmanager
    def paging(self, inputs: Tensor | None) -> Iterator[None]:
        """Context of a forward pass whose saved tensors go to the file, except its inputs (B, ...), if given."""
        tensors = [each for module in self._modules for each in (*module.parameters(), *module.buffers())]
        self._resident = {storage_id(each) for each in (inputs, *tensors) if each is not None}
        self._shapes = {each.shape for each in tensors if each.dim() > 1}
        del inputs, tensors
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self.file.read_ahead()

    def count_blocks(self, device: torch.device) -> None:
        """Count the memory of the page file in a step on the meta device, which has no file."""
        if device.type == "meta" and self._blocks is None:
            self._blocks = torch.empty(BLOCKS * BLOCK_BYTES, dtype=torch.uint8, device=device)

    def _stays(self, tensor: Tensor) -> bool:
        """Whether a saved tensor, of any shape, stays: a weight, also lowered by autocast, and what is small."""
        is_weight = storage_id(tensor) in self._resident or tensor.shape in self._shapes
        return is_weight or tensor.nbytes < SMALLEST_BYTES or memory_order(tensor) is None

    def _pack(self, tensor: Tensor) -> Tensor | PagedTensor:
        if self._stays(tensor):
            return tensor
        key = (storage_id(tensor), tensor.storage_offset(), tensor._version, *Layout.of(tensor))
        kept = self._paged.get(key)
        if kept is None or kept.storage() is not tensor.untyped_storage():  # another one may lie where it was
            self.bytes += tensor.nbytes
            kept = PagedTensor(tensor, None if tensor.is_meta else self.file.write(_bytes(tensor)))
            self._paged[key] = kept
        kept.uses += 1
        return kept

    def _unpack(self, kept: Tensor | PagedTensor) -> Tensor:
        return kept.read(self.file) if isinstance(kept, PagedTensor) else kept


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor of any shape."""
    values = memory_order(tensor.detach())
    if values is None:
        raise ValueError("a tensor with gaps cannot be paged")
    return values.view(torch.uint8).numpy().data
