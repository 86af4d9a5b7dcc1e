"""A network's leading layers over several processes, each with its own tiles: Algorithm 1 of Rama and Gerstlauer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from snugfit._core.options import Rest
from snugfit.tiling.adjoint import Adjoint, BackwardInput, BatchNormAdjoint, RegionTensor, zero_gradients
from snugfit.tiling.exchange import Cell, Pending, Routes, Source, Wanted, empty_map
from snugfit.tiling.layers import Region
from snugfit.tiling.operators import TileablePrefix
from snugfit.tiling.schedule import BackwardGroup, Schedule
from snugfit.tiling.splitting import Split, can_split
from snugfit.tiling.statistics import all_moments, update_running_statistics
from snugfit.tiling.transport import GatherHandle, OverlappedAllReduce, Transport, all_reduce


@dataclass
class _State:
    """What a process keeps of a step.

    Attributes:
        images: number in the batch.
        maps: feature maps saved for the backward pass, per cell and by number.
        moments: mean and variance (C,) of norms that normalise by their batch, by number of the layer.
        sums: sums that such a norm needs for its backward pass, where they are on their way early.
    """

    images: int
    maps: dict[int, dict[int, RegionTensor]] = field(default_factory=dict)
    moments: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sums: dict[int, GatherHandle] = field(default_factory=dict)


class TiledNetwork:
    """The leading layers of a network on this process's tiles.

    Every process calls :meth:`forward` and then :meth:`backward`. The gateway, rank 0, has the images. Either the
    gateway or every process receives the last feature map and returns its gradient. Each process computes its share of
    the weights' gradients, and :meth:`sum_gradients` adds them up. The result equals the step of one process on whole
    feature maps.

    Args:
        prefix: the layers; parameters and buffers are those of this process.
        schedule: what every tile holds, fetches and computes.
        cells: tiles of all processes.
        transport: to the other processes.
        rest: who receives the last feature map and returns its gradient.
        split: forward groups that, where possible, run the part of their first layer that needs no halo while the halo
            is on its way. Processes may differ in this.

    Attributes:
        waited: seconds of waiting, by reason: ``halos``, the ``gateway`` (images, the last feature map and its
            gradient), or ``sums`` over feature maps and of gradients. The rest of a step is computation.
    """

    def __init__(
        self,
        prefix: TileablePrefix,
        schedule: Schedule,
        cells: Sequence[Cell],
        transport: Transport,
        rest: Rest = "gateway",
        split: Container[int] = (),
    ) -> None:
        self.split = frozenset(
            index for index in range(len(schedule.forward.groups)) if index in split and can_split(schedule, index)
        )
        self.prefix, self.schedule, self.cells, self.transport = prefix, schedule, tuple(cells), transport
        self.routes, self.replicated = Routes(schedule, self.cells, transport.size), rest == "replicated"
        self.mine = [number for number, cell in enumerate(self.cells) if cell.rank == transport.rank]
        self._state = _State(0)
        self._later: tuple[Adjoint, tuple[BackwardInput, ...]] | None = None
        self._running: OverlappedAllReduce | None = None
        self.waited: dict[str, float] = defaultdict(float)

    @cached_property
    def like(self) -> Tensor:
        """An example tensor with the type and device of weights and feature maps; any shape."""
        parameter = next(iter(self.prefix.parameters(0, len(self.prefix.operators))), None)
        return torch.empty(0) if parameter is None else parameter.detach()

    @cached_property
    def by_batch(self) -> tuple[int, ...]:
        """Numbers of the layers that normalise by their batch, in the mode in which the prefix was made."""
        return tuple(number for number, layer in enumerate(self.prefix.layers.layers) if layer.sums)

    @torch.no_grad()
    def forward(self, images: Tensor | None, count: int) -> Tensor | None:
        """Compute the last feature map.

        Args:
            images: (B, C, H, W) on the gateway; None elsewhere.
            count: B, on all processes.

        Returns:
            The last feature map, (B, C, H, W), on processes that compute the rest; None elsewhere.
        """
        self._state = _State(count, {cell: {} for cell in self.mine})
        last = self.schedule.forward.cuts[-1]
        values = {0: images} if images is not None else {}
        for index, (start, stop) in enumerate(self.schedule.forward.groups):
            regions = {cell: self.schedule.forward_groups[self.cells[cell].tile][index] for cell in self.mine}
            source: Source = "gateway" if index == 0 else "cores"
            pending = self._begin(start, source, values, Wanted("forward", index))
            if index and start in self.by_batch:  # its sums travel with the halo
                self._state.moments[start] = self._moments(start, values)
            inner = self._inner(start, regions, values) if index in self.split else {}
            held = self._held(pending, "halos" if index else "gateway")
            entries = {cell: {start: held[cell]} for cell in self.mine}
            for cell, (parts, values_inside) in inner.items():
                entries[cell][start + 1] = self._outer(
                    start, regions[cell][start + 1], parts, values_inside, held[cell]
                )
            made = self._run(start + (index in self.split), stop, regions, entries, keep=True)
            values = {cell: made[cell][stop].part(self._core(stop, cell)) for cell in self.mine}
        return self._gather(last, values, everywhere=self.replicated)

    def track(self, images: Tensor | None, count: int) -> Tensor | None:
        """Run :meth:`forward`, (B, C, H, W) to (B, C, H, W), for norms to track statistics; nothing is saved."""
        found = self.forward(images, count)
        self._state = _State(0)
        return found

    @torch.no_grad()
    def backward(self, gradient: Tensor | None, *, sums: bool = False) -> Tensor | None:
        """Pass the gradient of the last feature map back and add gradients of weights to ``.grad`` on every process.

        Args:
            gradient: (B, C, H, W) on processes that compute the rest; None elsewhere.
            sums: whether :meth:`sum_gradients` follows at once, the same on all processes: sums then begin as soon as
                the gradients of a layer are complete.

        Returns:
            The gradient of the images, (B, C, H, W), on the gateway if the schedule includes it; None elsewhere.
        """
        assert self.schedule.network is not None
        groups = {cell: self.schedule.backward_groups[self.cells[cell].tile] for cell in self.mine}
        spans = [(group.start, group.stop) for group in next(iter(self.schedule.backward_groups.values()))]
        values = {self.transport.rank: gradient} if gradient is not None else {}
        first: Source = "everyone" if self.replicated else "gateway"
        self._running = OverlappedAllReduce(self.transport) if sums and self.transport.size > 1 else None
        above = len(self.prefix.operators)
        for index, (start, stop) in enumerate(spans):
            here = {cell: groups[cell][index] for cell in self.mine}
            pending = self._begin(stop, "cores" if index else first, values, Wanted("backward", index))
            self._recompute(index, start, stop, here)
            if index and stop - 1 in self.by_batch:  # its sums travel with the halo
                self._state.sums[stop - 1] = self._sums_of_cores(stop, here, values)
            self._train_later()
            above = self._sum_down_to(stop, above)
            values = self._back(start, stop, here, self._held(pending, "halos" if index else "gateway"))
        self._train_later()
        self._sum_down_to(0, above)
        found = self._gather(0, values) if self.schedule.network.flows[0] else None
        self._state = _State(0)
        return found

    def sum_gradients(self) -> None:
        """Add up the gradients of weights over processes, in place; all processes then have the sums."""
        with self._waiting("sums"):
            if self._running is None:
                all_reduce(self.gradients(), self.transport)
            else:
                self._running.wait()
        self._running = None

    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters of the layers."""
        layers = self.prefix.parameters(0, len(self.prefix.operators))
        return [parameter for parameter in layers if parameter.requires_grad]

    def gradients(self) -> list[Tensor]:
        """Gradients of the trained parameters, in their shapes; zeros where there is none."""
        return [_gradient(parameter) for parameter in self.parameters()]

    @cached_property
    def _first_read(self) -> list[list[nn.Parameter]]:
        """Parameters of each layer that no earlier layer has: their gradients are complete once the layer's are."""
        before = [{*self.prefix.parameters(0, number)} for number in range(len(self.prefix.operators))]
        return [
            [each for each in self.prefix.parameters(number, number + 1) if each not in known]
            for number, known in enumerate(before)
        ]

    def _sum_down_to(self, number: int, above: int) -> int:
        """Begin to sum the gradients of layers ``number`` to ``above - 1``; returns ``number``."""
        if self._running is not None:
            for layer in reversed(range(number, above)):
                self._running.add([_gradient(each) for each in self._first_read[layer] if each.requires_grad])
        return number

    # Running layers forward

    def _run(
        self,
        start: int,
        stop: int,
        regions: Mapping[int, Mapping[int, Region]],
        entries: dict[int, dict[int, RegionTensor]],
        *,
        keep: bool,
    ) -> dict[int, dict[int, RegionTensor]]:
        """Run layers on this process's cells; all of them together up to each norm that normalises by its batch.

        For every cell, ``regions`` are what it holds of every feature map, and ``entries`` the parts (B, C, h, w) that
        it begins with. The forward pass keeps feature maps and tracks statistics; otherwise, all feature maps that the
        backward pass reads are returned too.
        """
        stops = [start, *(number for number in self.by_batch if start < number < stop), stop]
        state, held = self._state, entries
        for first, end in pairwise(stops):
            moments = {}
            if first in self.by_batch and first < end:  # nothing is left of a split group of one layer
                if first not in state.moments:
                    read = self.prefix.layers.layers[first].reads[0]
                    cores = {cell: held[cell][read].part(self._core(read, cell)) for cell in self.mine}
                    state.moments[first] = self._moments(first, cores)
                moments = {first: state.moments[first]}
            for cell in self.mine:
                held[cell] = self._run_cell(cell, first, end, regions[cell], held[cell], moments, keep=keep)
        return held

    def _inner(
        self, start: int, regions: Mapping[int, Mapping[int, Region]], values: Mapping[int, Tensor]
    ) -> dict[int, tuple[Split, Tensor]]:
        """For every cell, how its first layer is split, and the part (B, C, h, w) of its output that needs no halo."""
        layers, found = self.prefix.layers, dict[int, tuple[Split, Tensor]]()
        for cell in self.mine:
            own = RegionTensor(values[cell], self._core(start, cell))
            parts = Split.of(layers.layers[start], regions[cell][start + 1], own.region, layers.maps[start])
            found[cell] = parts, self.prefix.part(start, parts.inner, own)
        return found

    def _outer(self, start: int, made: Region, parts: Split, inner: Tensor, held: RegionTensor) -> RegionTensor:
        """The whole output (B, C, h, w) of a group's first layer: the inner part, and strips around it."""
        if parts.inner == made:
            return RegionTensor(inner, made)
        shape = (*inner.shape[:2], len(made.rows), len(made.columns))
        last = held.values.stride(1) == 1 and inner.shape[1] > 1
        whole = RegionTensor(empty_map(shape, inner, last=last), made)
        whole.part(parts.inner).copy_(inner)
        for strip in parts.strips:
            whole.part(strip).copy_(self.prefix.part(start, strip, held))
        return whole

    def _run_cell(
        self,
        cell: int,
        start: int,
        stop: int,
        regions: Mapping[int, Region],
        entries: dict[int, RegionTensor],
        moments: Mapping[int, tuple[Tensor, Tensor]],
        *,
        keep: bool,
    ) -> dict[int, RegionTensor]:
        kept = self.schedule.kept.get(self.cells[cell].tile, {}) if keep else regions
        tensors = {number: each.values for number, each in entries.items()}
        made = self.prefix.run(start, stop, dict(regions), tensors, moments, keep=kept)
        found = entries | {number: RegionTensor(values, regions[number]) for number, values in made.items()}
        if keep:
            own = self._state.maps[cell]
            own |= {number: each for number, each in found.items() if number in kept}
            alive = self.prefix.layers.alive(stop)
            return {number: each for number, each in found.items() if number in alive}
        return found

    def _moments(self, number: int, cores: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance (C,) of the feature map that a norm reads, over all cells; tracks its statistics."""
        norm = self.prefix.operators[number].module
        assert isinstance(norm, nn.BatchNorm2d)
        read = self.prefix.layers.layers[number].reads[0]
        parts = [cores[cell] for cell in self.mine]
        counts = self.routes.pixels(read, self._state.images)
        like = self.like.new_empty(norm.num_features)
        with self._waiting("sums"):
            mean, variance = all_moments(parts, counts, like, self.transport)
        pixels = self._pixels(read)
        if pixels < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got {pixels}")
        update_running_statistics(norm, mean, variance, pixels)
        return mean, variance

    # Running layers backward

    def _recompute(self, index: int, start: int, stop: int, groups: Mapping[int, BackwardGroup]) -> None:
        """Recompute the feature maps that a group's backward pass reads, where they were not kept."""
        if not any(each[index].entries for each in self.schedule.backward_groups.values()):
            return
        cores = {cell: self._state.maps[cell][start].part(self._core(start, cell)) for cell in self.mine}
        held = self._held(self._begin(start, "cores", cores, Wanted("recompute", index)))
        for cell in self.mine:
            self._state.maps[cell][start] = held[cell]
        regions = {cell: self.prefix.layers.needed(start, stop, groups[cell].saved) for cell in self.mine}
        made = self._run(start, stop, regions, {cell: {start: held[cell]} for cell in self.mine}, keep=False)
        for cell in self.mine:
            self._state.maps[cell] |= made[cell]

    def _back(
        self, start: int, stop: int, groups: Mapping[int, BackwardGroup], upper: Mapping[int, RegionTensor]
    ) -> dict[int, Tensor]:
        """Pass gradients (B, C, h, w) of a group's last feature map back to cores of its first; frees saved ones."""
        network = self.schedule.network
        assert network is not None
        gradients = {cell: {stop: upper[cell]} for cell in self.mine}
        for number in reversed(range(start, stop)):
            if network.flows[number + 1]:
                self._back_layer(number, groups, gradients)
            for cell in self.mine:
                gradients[cell].pop(number + 1, None)
                self._state.maps[cell].pop(number + 1, None)
        return {
            cell: gradients[cell][start].part(self._core(start, cell)) for cell in self.mine if network.flows[start]
        }

    def _back_layer(
        self, number: int, groups: Mapping[int, BackwardGroup], gradients: dict[int, dict[int, RegionTensor]]
    ) -> None:
        operator = self.prefix.operators[number]
        parts = {cell: self._part(number, cell, groups[cell], gradients[cell]) for cell in self.mine}
        back: Callable[[BackwardInput], Sequence[Tensor | None]] = operator.adjoint.input_gradients
        if isinstance(operator.adjoint, BatchNormAdjoint) and number in self.by_batch:
            back = self._norm_back(operator.adjoint, number, parts)
        elif operator.adjoint.has_trainable_weights():
            self._train_later()
            self._later = (operator.adjoint, tuple(parts.values()))
            if isinstance(operator.adjoint, BatchNormAdjoint):  # it may overwrite what its weights read
                self._train_later()
        for cell, part in parts.items():
            if any(part.wanted):
                passed = back(part) if part.gradient.values.numel() else zero_gradients(part)
                for read, region, found in zip(operator.layer.reads, part.wanted, passed, strict=True):
                    if found is not None and region is not None:
                        _add(gradients[cell], read, RegionTensor(found, region, operator.adjoint.owns_memory))

    def _train_later(self) -> None:
        """Compute weight gradients that were postponed, for the last layer of a group until its halo is on its way."""
        if self._later is not None:
            adjoint, parts = self._later
            self._later = None
            for part in parts:
                if part.core.area and len(part.gradient.values):
                    adjoint.add_weight_gradients(part)

    def _norm_back(
        self, norm: BatchNormAdjoint, number: int, parts: Mapping[int, BackwardInput]
    ) -> Callable[[BackwardInput], Sequence[Tensor | None]]:
        """A function that passes gradients (B, C, h, w) back through a norm by its batch, from sums over all cells."""
        gathering = self._state.sums.pop(number, None)
        if gathering is None:
            gathering = self._sums(norm, parts)
            self._train_later()
        with self._waiting("sums"):
            sums = torch.stack(gathering.wait()).sum(0)
        pixels = self._pixels(self.prefix.layers.layers[number].reads[0])
        return lambda part: norm.input_gradients_by_batch(part, sums[0], sums[1], pixels)

    def _sums(self, norm: BatchNormAdjoint, parts: Mapping[int, BackwardInput]) -> GatherHandle:
        """Sums (2, C) of every process for a norm by its batch to pass gradients back; adds its weights' gradients."""
        sums = torch.zeros(2, norm.layer.num_features, dtype=self.like.dtype, device=self.like.device)
        for part in parts.values():
            plain, products = norm.sums(part)
            norm.add(plain, products)
            sums += torch.stack([plain, products])
        return self.transport.gather(sums)

    def _sums_of_cores(
        self, stop: int, groups: Mapping[int, BackwardGroup], values: Mapping[int, Tensor]
    ) -> GatherHandle:
        """The sums (2, C) of the norm that ends a group, while only cores of its output's gradient are there."""
        norm = self.prefix.operators[stop - 1].adjoint
        assert isinstance(norm, BatchNormAdjoint)
        held = {cell: {stop: RegionTensor(values[cell], self._core(stop, cell))} for cell in self.mine}
        return self._sums(norm, {cell: self._part(stop - 1, cell, groups[cell], held[cell]) for cell in self.mine})

    def _part(
        self, number: int, cell: int, group: BackwardGroup, gradients: Mapping[int, RegionTensor]
    ) -> BackwardInput:
        layer, maps, layers = self.prefix.layers.layers[number], self._state.maps[cell], self.prefix.layers
        assert self.schedule.network is not None
        flows = self.schedule.network.flows
        return BackwardInput(
            layer,
            [layers.maps[read] for read in layer.reads],
            gradients[number + 1],
            self._core(number + 1, cell),
            [maps.get(read) for read in layer.reads],
            maps.get(number + 1),
            [group.gradients[read] if flows[read] else None for read in layer.reads],
            self._state.moments.get(number),
        )

    # Parts of maps

    def _core(self, number: int, cell: int) -> Region:
        return self.routes.core(number, cell)

    def _pixels(self, number: int) -> int:
        return self._state.images * self.prefix.layers.maps[number].whole.area

    def _begin(self, number: int, source: Source, values: Mapping[int, Tensor], wanted: Wanted) -> Pending:
        exchange = self.routes.exchange(number, source, wanted, self._state.images)
        return exchange.start(values, self.transport, self.like)

    def _held(self, pending: Pending, what: str = "halos") -> dict[int, RegionTensor]:
        """The parts (B, C, h, w) that this process's cells need."""
        wanted, given = pending.exchange.wanted, {_memory(values) for values in pending.values.values()}
        with self._waiting(what):
            found = pending.wait()
        return {
            cell: RegionTensor(values, wanted[cell].region, _memory(values) not in given)
            for cell, values in found.items()
        }

    def _gather(self, number: int, values: Mapping[int, Tensor], *, everywhere: bool = False) -> Tensor | None:
        """The whole feature map (B, C, H, W) from cores; if everywhere, in one memory format, to compute the same."""
        wanted = Wanted("everyone" if everywhere else "gateway")
        with self._waiting("gateway"):
            found = self._begin(number, "cores", values, wanted).wait().get(self.transport.rank)
        return found.contiguous(memory_format=torch.channels_last) if everywhere and found is not None else found

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.waited[what] += time.perf_counter() - started


def _add(gradients: dict[int, RegionTensor], number: int, found: RegionTensor) -> None:
    """Add a gradient (B, C, h, w) to those that other readers passed back, all of the same region."""
    before = gradients.get(number)
    gradients[number] = found if before is None else RegionTensor(before.values + found.values, found.region, True)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, in its shape; zeros are set where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _memory(values: Tensor) -> int:
    """Address of the storage of a tensor of any shape."""
    return values.untyped_storage().data_ptr()
