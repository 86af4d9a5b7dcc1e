"""What every tile holds, fetches and computes in a training step, from two grouping profiles: regions only, no torch.

Forward, a group begins with the halo of its first feature map; backward, with the halo of the gradient of its last one
(section 4.2 of Rama and Gerstlauer, UT-CERC-24-02). The feature maps that the backward pass reads are either kept from
the forward pass, which makes them a little wider than it needs itself, or recomputed from the first one of a backward
group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from snugfit.tiling.grouping import Profile
from snugfit.tiling.layers import Layers, Region, Tiling

Regions = dict[int, Region]
"""Regions of feature maps, by number."""

Reads = Literal["nothing", "input", "core", "output"]
"""What the backward pass of a layer reads: nothing, its input, its input for its own tile alone, or its output."""


@dataclass(frozen=True)
class BackwardRules:
    """What a network's backward pass needs.

    For every feature map, whether its gradient flows; for every layer, whether it trains and what is read of it.
    """

    flows: tuple[bool, ...]
    trains: tuple[bool, ...]
    reads: tuple[Reads, ...]

    @classmethod
    def of(
        cls, layers: Layers, trains: Sequence[bool], reads: Sequence[Reads], *, image: bool = False
    ) -> BackwardRules:
        """Gradients are needed behind the first trained weights, or everywhere if that of the image is needed."""
        flows = [image]
        for layer, own in zip(layers.layers, trains, strict=True):
            flows.append(own or any(flows[read] for read in layer.reads))
        return cls(tuple(flows), tuple(trains), tuple(reads))


@dataclass(frozen=True)
class BackwardGroup:
    """A group of the backward pass on one tile.

    Attributes:
        start, stop: cuts.
        gradients: regions where the tile computes the gradient of each feature map; of the last one, where it needs it.
        saved: regions of the feature maps that it reads.
        entries: region of the first feature map from which these are recomputed.
    """

    start: int
    stop: int
    gradients: Regions
    saved: Regions
    entries: Regions


@dataclass(frozen=True)
class Schedule:
    """A training step of tiles, with a grouping profile for each pass.

    Attributes:
        network: what the backward pass needs of the layers; None without a backward pass, as in evaluation.
        recompute: whether a backward group recomputes the feature maps that it reads; otherwise they are kept.
    """

    tiling: Tiling
    forward: Profile
    backward: Profile
    network: BackwardRules | None
    recompute: bool = False

    @cached_property
    def backward_groups(self) -> dict[tuple[int, int], list[BackwardGroup]]:
        """The groups of the backward pass from the last to the first, for every tile."""
        found: dict[tuple[int, int], list[BackwardGroup]] = {}
        for tile in self.tiling.tiles:
            groups = [each for each in reversed(self.backward.groups) if self.network and self.network.flows[each[1]]]
            found[tile] = [self._backward_group(start, stop, tile) for start, stop in groups]
        return found

    @cached_property
    def kept(self) -> dict[tuple[int, int], Regions]:
        """The regions that the forward pass keeps for the backward pass, for every tile."""
        found: dict[tuple[int, int], Regions] = {}
        for tile, groups in self.backward_groups.items():
            regions: Regions = {}
            for group in groups:
                wanted = group.saved
                if self.recompute:
                    wanted = {group.start: self.tiling.core(group.start, tile)} if group.entries else {}
                    if group.stop == self.backward.cuts[-1] and group.stop in group.saved:
                        wanted[group.stop] = group.saved[group.stop]
                regions = _hulls(regions, wanted)
            found[tile] = regions
        return found

    @cached_property
    def forward_groups(self) -> dict[tuple[int, int], list[Regions]]:
        """The regions that each tile holds in each forward group; of the first feature map, with its halo.

        What is kept of a feature map between groups is fetched with the halo, not computed twice.
        """
        found: dict[tuple[int, int], list[Regions]] = {}
        last = self.forward.cuts[-1]
        for tile in self.tiling.tiles:
            kept, held = self.kept.get(tile, {}), []
            for start, stop in self.forward.groups:
                wanted = {stop: self.tiling.core(stop, tile)}
                ends = stop + 1 if stop == last else stop
                wanted = _hulls(wanted, self._summed(start, stop, tile))
                wanted = _hulls(wanted, {number: kept[number] for number in range(start, ends) if number in kept})
                held.append(self.tiling.layers.needed(start, stop, wanted))
            found[tile] = held
        return found

    def merged(self) -> Schedule:
        """The same work in fewer groups: groups are merged where no tile fetches anything.

        Backward groups that recompute feature maps stay, since they bound how many of these are held.
        """
        tiles, core = self.tiling.tiles, self.tiling.core
        forward = [
            start
            for index, (start, _) in enumerate(self.forward.groups)
            if index and any(self.forward_groups[tile][index].get(start) != core(start, tile) for tile in tiles)
        ]
        backward = [
            groups[0].stop
            for index, groups in enumerate(zip(*self.backward_groups.values(), strict=True))
            if index
            and any(
                found.gradients.get(found.stop) != core(found.stop, tile)
                for tile, found in zip(tiles, groups, strict=True)
            )
        ]
        found = replace(self, forward=_meeting(self.forward, forward))
        if self.recompute or self.network is None:
            return found
        return replace(found, backward=_meeting(self.backward, backward))

    def _summed(self, start: int, stop: int, tile: tuple[int, int]) -> Regions:
        """A tile's own pixels of feature maps that are summed, including those that nothing else reads."""
        layers = self.tiling.layers.layers[start:stop]
        return {read: self.tiling.core(read, tile) for layer in layers if layer.sums for read in layer.reads}

    def _backward_group(self, start: int, stop: int, tile: tuple[int, int]) -> BackwardGroup:
        assert self.network is not None
        layers, core = self.tiling.layers, self.tiling.core
        gradients: Regions = {start: core(start, tile)} if self.network.flows[start] else {}
        for number in range(start, stop):
            if not self.network.flows[number + 1]:
                continue
            layer = layers.layers[number]
            region = core(number + 1, tile)
            for read in layer.reads:
                if read in gradients:
                    region = region.hull(layer.reaches(gradients[read]) & layers.maps[number + 1].whole)
            gradients[number + 1] = region
        saved = self._saved(start, stop, gradients, tile)
        entries = layers.needed(start, stop, saved) if self.recompute else {}
        return BackwardGroup(start, stop, gradients, saved, {start: entries[start]} if start in entries else {})

    def _saved(self, start: int, stop: int, gradients: Regions, tile: tuple[int, int]) -> Regions:
        """The regions of feature maps that a group's backward pass reads."""
        assert self.network is not None
        layers, saved = self.tiling.layers, dict[int, Region]()
        for number in range(start, stop):
            if number + 1 not in gradients:
                continue
            layer, reads = layers.layers[number], self.network.reads[number]
            if reads == "output":
                saved = _hulls(saved, {number + 1: gradients[number + 1]})
            if reads in ("input", "core"):
                made = gradients[number + 1] if reads == "input" else self.tiling.core(number + 1, tile)
                needs = layer.needs(made)
                saved = _hulls(saved, {read: needs & layers.maps[read].whole for read in layer.reads})
        return saved


def _meeting(profile: Profile, inner: Iterable[int]) -> Profile:
    return Profile((profile.cuts[0], *sorted(inner), profile.cuts[-1]))


def _hulls(first: Mapping[int, Region], second: Mapping[int, Region]) -> Regions:
    """The smallest region that contains both, for every feature map."""
    return {
        number: first[number].hull(second[number])
        if number in first and number in second
        else first.get(number) or second[number]
        for number in sorted({*first, *second})
    }
