"""Recomputation in a network that another library calls: its forward pass is replaced for as long as a loop runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings
from snugfit._engine.loop_plan import on_meta, step_workload
from snugfit.profiling import unit_stats
from snugfit.strategies.checkpoint.candidates import find_candidates
from snugfit.strategies.recomputation.paging import recomputing_forward
from snugfit.strategies.recomputation.schedule import Schedule

Around = Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]
"""Makes a forward pass of images (B, ...) of another one."""


class NoRecomputation:
    """The forward pass of a library stays as it is."""

    schedules: Sequence[str] = ()

    def use(self, schedule: str) -> None:
        """Change nothing."""


class ForwardRecomputation:
    """Recomputation of a network's units, from the fastest of a few schedules to that with the least memory.

    Args:
        network: a module within what the library trains, whose forward pass maps images (B, ...) to one tensor.
        images: a batch (B, ...) of such images.
        around: what a library that has replaced the network's ``forward`` computes around it; without it such a network
            is not recomputed.
    """

    def __init__(self, network: nn.Module, images: Tensor, around: Around | None = None) -> None:
        self.network = network
        self._before = vars(network).get("forward")
        self._around = around or (lambda run: run)
        self._hidden = self._before is not None and around is None
        shape = cast("tuple[int, int, int]", tuple(images.shape[1:]))
        self._chain = Chain.from_any_module(network, shape)
        self.schedules: Sequence[str] = self._found(shape, len(images))
        known = set(network.modules())
        self._made = [each for unit in self._units for each in unit.modules() if each not in known]

    @property
    def _units(self) -> list[nn.Module]:
        return [unit.module for unit in self._chain.all_units]

    def _found(self, shape: tuple[int, int, int], batch: int) -> list[str]:
        meta = Chain.from_any_module(on_meta(self.network), shape)
        if self._hidden or self._chain.stores or self._chain.undivided or meta.reasons_against_units(recomputed=True):
            return []
        workload = step_workload(self.network, shape, batch, OptimizerSettings("sgd"))
        found = find_candidates(meta, unit_stats(meta), workload)
        recomputing = [str(each.schedule) for each in found if each.schedule.recomputes]
        return list(dict.fromkeys([*recomputing[len(recomputing) // 2 :][:1], *recomputing[-1:]]))

    def use(self, schedule: str) -> None:
        """Recompute by a schedule from now on; none if it is empty."""
        if schedule:
            run = recomputing_forward(self._units, Schedule.parse(schedule))
            self.network.forward = self._around(lambda images: run(self._following_modes(images)))
        elif self._before is not None:
            self.network.forward = self._before
        else:
            vars(self.network).pop("forward", None)

    def _following_modes(self, images: Tensor) -> Tensor:
        """The images (B, ...); functional dropouts, which tracing has made layers of, follow the network's mode."""
        for layer in self._made:
            layer.training = self.network.training
        return images


def recomputation_of(
    network: nn.Module | None, images: Tensor, around: Around | None = None
) -> ForwardRecomputation | NoRecomputation:
    """Recomputation in a network for images (B, ...), if there is a network; see :class:`ForwardRecomputation`."""
    return NoRecomputation() if network is None else ForwardRecomputation(network, images, around)
