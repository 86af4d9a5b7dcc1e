"""The forward pass of a recomputation schedule, and what autograd saves for the backward pass, on disk meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from snugfit._training.network import Forward
from snugfit.lean.saved_tensors import Layout, memory_order
from snugfit.memory.paging import BLOCK_BYTES, BLOCKS, Page, PageFile
from snugfit.memory.tensors import storage_id
from snugfit.strategies.recomputation.module_forward import contexts, recomputing_calls
from snugfit.strategies.recomputation.schedule import AnySchedule, ModuleSchedule, Schedule

SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay in memory."""


def recomputing_forward(modules: Sequence[nn.Module], schedule: AnySchedule, file: PageFile | None = None) -> Forward:
    """The forward pass over consecutive modules, with recomputation and paging by a schedule.

    A stretch that is recomputed is a checkpoint of torch's; stretches within it are nested checkpoints. Tensors that
    the backward pass has used are freed at once, as are gradients that it has passed on.

    Args:
        modules: such as those of a chain's units; the network alone, if its modules run again.
        schedule: of all of them, or of modules of the network.
        file: for what the schedule keeps on disk.

    Returns:
        A function from the first module's input (B, ...) to the last one's output (B, ...).
    """
    if isinstance(schedule, ModuleSchedule):
        return recomputing_calls(modules[0], schedule.names)
    paged, resident = Schedule(schedule.parts[: schedule.paged]), Schedule(schedule.parts[schedule.paged :])
    pager = Pager(file, modules) if file is not None and schedule.paged else None

    def run(stretch: Schedule, values: Tensor) -> Tensor:
        for part in stretch.parts:
            if isinstance(part, Schedule):
                inside = partial(contexts, [modules[unit] for unit in part.units])
                values = checkpoint(run, part, values, use_reentrant=False, context_fn=inside)
            else:
                values = modules[part](values)
        return values

    def run_paged(pager: Pager, values: Tensor) -> Tensor:
        pager.count_blocks(values.device)
        with pager.paging(values):
            values = run(paged, values)
        return run(resident, values)

    return partial(run, schedule) if pager is None else partial(run_paged, pager)


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
