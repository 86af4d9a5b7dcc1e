"""The forward pass of a recomputation schedule; what autograd saves may leave memory until the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

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
from snugfit.strategies.recomputation.separate_graphs import SeparateGraphs

SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay in memory."""


class Pages(Protocol):
    """Where saved values are between the forward and the backward pass: on disk, or a GPU's in host memory."""

    def begin(self, device: torch.device) -> None:
        """A forward pass on a device begins; nothing is left of one that failed."""

    def write(self, values: Tensor) -> Any:
        """Begin to move values (N,) there; returns their page."""

    def read(self, page: Any) -> Tensor:
        """The values of a page, (N,), in memory again; the backward pass reads the last page first."""

    def finish(self) -> None:
        """The forward pass has written its last page."""


@dataclass(frozen=True)
class DiskPage:
    """Values (N,) in a page file; those of the meta device have no page."""

    page: Page | None
    count: int
    dtype: torch.dtype
    device: torch.device


class DiskPages:
    """:class:`Pages` in a file, which is not touched by values of the meta device.

    Args:
        file: the file.
    """

    def __init__(self, file: PageFile) -> None:
        self.file = file
        self._blocks: Tensor | None = None

    def write(self, values: Tensor) -> DiskPage:
        """Write values (N,) of any type in the background."""
        page = None if values.is_meta else self.file.write(_bytes(values))
        return DiskPage(page, len(values), values.dtype, values.device)

    def read(self, page: DiskPage) -> Tensor:
        """Read values (N,), and pages that were written before them in the background."""
        values = torch.empty(page.count, dtype=page.dtype, device=page.device)
        if page.page is not None:
            self.file.read(page.page, _bytes(values))
        return values

    def finish(self) -> None:
        """Begin to read the last pages."""
        self.file.read_ahead()

    def begin(self, device: torch.device) -> None:
        """Count the memory of the page file in a step on the meta device, which has no file."""
        if device.type == "meta" and self._blocks is None:
            self._blocks = torch.empty(BLOCKS * BLOCK_BYTES, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Paging:
    """Where a recomputation schedule may page to.

    Attributes:
        speed: bytes per second that are written, or read, where a processor does as much as
            :data:`snugfit.strategies.recomputation.unit_costs.TYPICAL_SPEED`.
        make: makes the pages of a network.
    """

    speed: float
    make: Callable[[], Pages] = lambda: DiskPages(PageFile(Path()))


def recomputing_forward(modules: Sequence[nn.Module], schedule: AnySchedule, pages: Pages | None = None) -> Forward:
    """The forward pass over consecutive modules, with recomputation and paging by a schedule.

    A stretch that is recomputed is a checkpoint of torch's; stretches within it are nested checkpoints. Tensors that
    the backward pass has used are freed at once, as are gradients that it has passed on, and, where anything runs
    again, the graphs of units and stretches.

    Args:
        modules: such as those of a chain's units; the network alone, if its modules run again.
        schedule: of all of them, or of modules of the network.
        pages: for what the schedule pages.

    Returns:
        A function from the first module's input (B, ...) to the last one's output (B, ...).
    """
    if isinstance(schedule, ModuleSchedule):
        return recomputing_calls(modules[0], schedule.names)
    pager = Pager(pages, modules) if pages is not None and schedule.paged else None
    first = 0 if pager is None else schedule.paged
    paged, resident = Schedule(schedule.parts[:first]), Schedule(schedule.parts[first:])

    def run(stretch: Schedule, values: Tensor, graphs: SeparateGraphs | None = None) -> Tensor:
        for part in stretch.parts:
            values = values if graphs is None else graphs.cut(values)
            if isinstance(part, Schedule):
                inside = partial(contexts, [modules[unit] for unit in part.units])
                values = checkpoint(run, part, values, use_reentrant=False, context_fn=inside)
            else:
                values = modules[part](values)
        return values

    def run_all(values: Tensor) -> Tensor:
        graphs = SeparateGraphs() if schedule.recomputes else None
        if pager is not None:
            pager.pages.begin(values.device)
            with pager.paging(values):
                values = run(paged, values, graphs)
        return run(resident, values, graphs)

    return run_all


class PagedTensor:
    """A saved tensor of any shape whose values are in a page; once they are read, in memory until all uses had them.

    Args:
        tensor: the tensor.
        page: its values.
    """

    def __init__(self, tensor: Tensor, page: object) -> None:
        self.layout, self.page, self.uses = Layout.of(tensor), page, 0
        self.storage = weakref.ref(tensor.untyped_storage())
        self._found: Tensor | None = None

    def read(self, pages: Pages) -> Tensor:
        """The values, of the shape and in the layout that they had, for one use."""
        found = self._found
        if found is None:
            found = pages.read(self.page).as_strided(self.layout.size, self.layout.stride)
        self.uses -= 1
        self._found = found if self.uses > 0 else None
        return found


class Pager:
    """Moves saved tensors to pages and back.

    Args:
        pages: where to.
        modules: their weights and buffers stay in memory.

    Attributes:
        bytes: of all tensors that were moved so far.
    """

    def __init__(self, pages: Pages, modules: Iterable[nn.Module]) -> None:
        self.pages, self.bytes, self._modules = pages, 0, list(modules)
        self._resident: set[int] = set()
        self._shapes: set[torch.Size] = set()
        self._paged: weakref.WeakValueDictionary[tuple[object, ...], PagedTensor] = weakref.WeakValueDictionary()

    @contextmanager
    def paging(self, inputs: Tensor | None) -> Iterator[None]:
        """Context of a forward pass whose saved tensors go to pages, except its inputs (B, ...), if given."""
        tensors = [each for module in self._modules for each in (*module.parameters(), *module.buffers())]
        self._resident = {storage_id(each) for each in (inputs, *tensors) if each is not None}
        self._shapes = {each.shape for each in tensors if each.dim() > 1}
        del inputs, tensors
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self.pages.finish()

    def _stays(self, tensor: Tensor) -> bool:
        """Whether a saved tensor, of any shape, stays: a weight, also lowered by autocast, and what is small."""
        is_weight = storage_id(tensor) in self._resident or tensor.shape in self._shapes
        return is_weight or tensor.nbytes < SMALLEST_BYTES

    def _pack(self, tensor: Tensor) -> Tensor | PagedTensor:
        if self._stays(tensor) or (values := memory_order(tensor.detach())) is None:
            return tensor
        key = (storage_id(tensor), tensor.storage_offset(), tensor._version, *Layout.of(tensor))
        kept = self._paged.get(key)
        if kept is None or kept.storage() is not tensor.untyped_storage():  # another one may lie where it was
            self.bytes += tensor.nbytes
            kept = PagedTensor(tensor, self.pages.write(values))
            self._paged[key] = kept
        kept.uses += 1
        return kept

    def _unpack(self, kept: Tensor | PagedTensor) -> Tensor:
        return kept.read(self.pages) if isinstance(kept, PagedTensor) else kept


def _bytes(values: Tensor) -> memoryview:
    """The memory of values (N,) on the processor."""
    return values.view(torch.uint8).numpy().data
