"""The strategy ``blockwise``: NeuroFlux (Saikumar and Varghese, section 5)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from snugfit._chain import Chain
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Phase, Shortfall
from snugfit._core.profile import Profile
from snugfit._core.record import Record
from snugfit._core.request import StrategyOptions
from snugfit._core.workload import Workload
from snugfit._storage.activation_cache import RowFormat
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit._training.task import needs_classes
from snugfit.local import check_local_loss
from snugfit.local.assignment import Layout
from snugfit.profiling import Probe, unit_stats
from snugfit.strategies.blockwise.blocks import (
    EVALUATION_SHARE,
    Residency,
    UnitNeeds,
    estimate_blocks,
    make_blocks,
    unit_batches,
)
from snugfit.strategies.blockwise.config import BlockwiseSettings, LayerCost, asks_for_exit, unit_option
from snugfit.strategies.blockwise.controller import Controller
from snugfit.strategies.blockwise.exit_costs import bytes_of_test, exit_costs, in_memory
from snugfit.strategies.blockwise.loss_choice import (
    AUTO,
    MODULE_BATCH,
    LossChoice,
    LossCost,
    local_losses,
    probe_suffix,
    profile_of,
)
from snugfit.strategies.blockwise.modules import (
    Module,
    Partition,
    PartitionFilter,
    all_partitions,
    even_modules,
    fastest_divisions,
)
from snugfit.strategies.blockwise.partition import Block
from snugfit.strategies.blockwise.probes import PROBE_PREFIX, module_costs, module_probe, module_probe_name, unit_probes
from snugfit.strategies.memory_estimates import (
    PASS_SHARE,
    RESERVED_BYTES,
    full_safety,
    reserved_bytes,
    smallest_budget,
    step_headroom,
    with_safety,
)
from snugfit.strategies.recomputation.dynamic_program import UnitCost
from snugfit.strategies.recomputation.unit_costs import unit_costs

TRAINED_BLOCKS_BYTES = 2_000_000
"""Lower bound of the bytes that trained blocks leave in memory: kernels of their shapes, file buffers."""

FRAGMENTS_BYTES = 1_000_000
"""Free heap in pieces too small to use, after trained blocks: tests of exits took up to 2.2 MB more than their feature
maps and weights."""

TEST_IMAGES = 16
"""Images at once in the test of the exit; more if the weights of one layer take more memory than their feature maps."""

HEAD_LOSS = "aan"
"""A local loss that leaves the last module to the network's own head alone, and with it a single module."""

UNITS_BEFORE_STOP = 2
"""Units in a block if training may stop early between blocks; with fewer units it stops earlier."""


@dataclass(frozen=True)
class Blockwise(BlockwiseSettings):
    """Trains blocks of units one after another on local losses; each block caches its outputs for the next."""

    @staticmethod
    def check_options(options: StrategyOptions) -> None:
        """Check the local loss and its options, which requires torch.

        Raises:
            UsageError: the local loss is unknown, or lacks an option.
        """
        if options.local_loss != AUTO:
            check_local_loss(options.local_loss)

    @staticmethod
    def leaner(options: StrategyOptions) -> Iterator[dict[str, Any]]:
        """Settings that need less memory, among those that the user left open; tried if nothing fits."""
        leanest = {"module_units": "1", "local_loss": local_losses(options.local_loss)[-1]}
        is_open = {"module_units": options.module_units == "auto", "local_loss": _is_open(options.local_loss)}
        if any(is_open.values()):
            yield {name: lean for name, lean in leanest.items() if is_open[name]}

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why the model is unsupported: local losses require feature maps or vectors, not tokens."""
        if reasons := needs_classes(workload):
            return reasons
        if reasons := chain.reasons_against_units():
            return reasons
        strange = next((unit for unit in chain.units if len(unit.output_shape) not in (1, 3)), None)
        if strange is None:
            return []
        shape = "x".join(map(str, strange.output_shape))
        return [f"unit {strange.name} gives {shape} values per image, but local losses require feature maps or vectors"]

    def prepared(self, workload: Workload, chain: Chain) -> Blockwise:
        """The strategy with the costs of the local losses to choose from, and of the test of their exits."""
        tested = tuple(
            (loss, exit_costs(Layout.of(chain, loss, workload.classes))) for loss in local_losses(self.local_loss)
        )
        if not _is_open(self.local_loss):
            return replace(self, exit_costs=tested)
        stats = unit_stats(chain)
        macs, units = sum(unit.macs for unit in stats), unit_costs(chain, stats, _priced_batch(workload))
        costs = tuple(self._loss_cost(loss, macs, units, workload, chain) for loss in local_losses(self.local_loss))
        return replace(self, loss_costs=costs, exit_costs=tested)

    def _loss_cost(
        self, loss: str, forward_macs: int, units: Sequence[UnitCost], workload: Workload, chain: Chain
    ) -> LossCost:
        layout = replace(self, local_loss=loss)._layout(chain, workload, even_modules(len(chain.units), 1))
        costs = module_costs(layout, units, workload, _priced_batch(workload))
        modules = even_modules(len(layout), self._fixed_units or 1)
        macs = 3 * forward_macs  # a forward pass and both gradients
        macs += sum(layout.make_loss(last).signal_macs(layout.unit_shape(last)) for _, last, _ in modules)
        return loss, tuple(costs.step_bytes(first, last) for first, last, _ in modules), macs

    @property
    def _fixed_units(self) -> int | None:
        """Units in a module; None if the budget decides."""
        if self.module_units != "auto":
            return int(self.module_units)
        return 1 if unit_option(vars(self)) else None

    def _losses(self) -> list[str]:
        """The local losses to consider, best first."""
        if not self.loss_costs or not _is_open(self.local_loss):
            return list(local_losses(self.local_loss))
        return LossChoice(self.loss_costs, self.loss_aim, asks_for_exit(vars(self))).order()

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """Probes of modules with their local losses.

        With ``module_units="auto"`` or several local losses to choose from they are lazy: first one module with all
        units, then two, and so on until one division fits with one of the losses; see :class:`PartitionFilter`.
        """
        if self._fixed_units is not None and not _is_open(self.local_loss):
            layout = self._layout(chain, workload, even_modules(len(chain.units), self._fixed_units))
            return unit_probes(layout, workload, hardware, self.cache_dtype)
        units = unit_costs(chain, unit_stats(chain), _priced_batch(workload)) if self._fixed_units is None else []
        found = [
            (len(partition.sizes), rank, loss, partition)
            for rank, loss in enumerate(self._losses())
            for partition in self._partitions(loss, units, workload, chain)
        ]
        found = [each for each in found if each[0] > 1 or each[1] == 0]  # a single module has the network's own loss
        if self._fixed_units is None and chain.reasons_against_units(recomputed=True):
            found = [each for each in found if not any(each[3].schedules)]
        found.sort(key=lambda each: each[:2])
        return self._lazy_probes([each[2:] for each in found], workload, chain, hardware)

    def _partitions(self, loss: str, units: Sequence[UnitCost], workload: Workload, chain: Chain) -> list[Partition]:
        """The partitions to consider with a local loss."""
        if self._fixed_units is not None:
            modules = even_modules(len(chain.units), self._fixed_units)
            step_bytes = {name: each for name, each, _ in self.loss_costs}[loss]
            sizes = tuple(last - first + 1 for first, last, _ in modules)
            return [Partition(sizes, ("",) * len(sizes), step_bytes)]
        layout = replace(self, local_loss=loss)._layout(chain, workload, even_modules(len(chain.units), 1))
        return all_partitions(module_costs(layout, units, workload, _priced_batch(workload)))

    def _lazy_probes(
        self, options: Sequence[tuple[str, Partition]], workload: Workload, chain: Chain, hardware: Hardware
    ) -> list[Probe]:
        """Probes that are measured until an option, of a local loss and a partition, fits; large modules first."""
        different: dict[str, Probe] = {}
        names = []
        for loss, partition in options:
            suffix = probe_suffix(loss) if _is_open(self.local_loss) else ""
            layout = replace(self, local_loss=loss)._layout(chain, workload, partition.modules)
            own = []
            for index in sorted(range(len(layout)), key=partition.step_bytes.__getitem__, reverse=True):
                first, last, schedule = partition.modules[index]
                units = [unit.name for unit in chain.units[first : last + 1]]
                own.append(name := module_probe_name(units, schedule) + suffix)
                if name not in different:
                    probe = module_probe(layout, index, schedule, workload, hardware, self.cache_dtype)
                    different[name] = replace(probe, name=name)
            names.append(own)
        judge = PartitionFilter([partition for _, partition in options], names, _wanted_batch(workload))
        return [replace(each, needed=partial(judge.is_worth_measuring, name)) for name, each in different.items()]

    def _layout(self, chain: Chain, workload: Workload, modules: Sequence[Module]) -> Layout:
        sizes = [last - first + 1 for first, last, _ in modules]
        loss = self.local_loss if len(sizes) > 1 else HEAD_LOSS
        return Layout.of(chain, loss, workload.classes, sizes, workload.label_smoothing)

    def _needs(self, workload: Workload, profile: Profile) -> tuple[UnitNeeds, ...]:
        """Memory needs of each module; infinite for one that does not fit at one sample."""
        return tuple(self._need(workload, profile, module) for module in self._divided(profile))

    def _divided(self, profile: Profile) -> tuple[Module, ...]:
        """The modules; one per unit until ``propose`` has set them."""
        return self.modules or even_modules(len(profile.units) - 1, 1)

    def _need(self, workload: Workload, profile: Profile, module: Module) -> UnitNeeds:
        first, last, _ = module
        known = [line.shape_bytes for line in profile.lines.values() if len(line.points) > 1]
        unknown = float(np.median(known)) if known else 0.0
        units, probe = profile.units[first : last + 1], _probe_name(profile, module)
        line, outputs = profile.lines.get(probe), tuple(units[-1].output_shape)
        shape = tuple(profile.units[first - 1].output_shape if first else workload.input_shape)
        new = 0.0 if line is None else line.shape_bytes if len(line.points) > 1 else unknown
        return UnitNeeds(
            name=probe.removeprefix(PROBE_PREFIX).partition(" ")[0],
            kept_bytes=profile.kept[probe],
            fixed_bytes=line.fixed_bytes + line.residual_bytes + new if line else math.inf,
            sample_bytes=line.sample_bytes if line else math.inf,
            input_elements=math.prod(shape),
            input_bytes=RowFormat(shape, self.cache_dtype).row_bytes,
            output_bytes=RowFormat(outputs, self.cache_dtype).row_bytes,
            smallest_batch=line.smallest_batch if line else 1,
            weight_bytes=sum(stats.weight_bytes for stats in units),
            saved_bytes=max(stats.saved_bytes + stats.output_bytes for stats in units),
            shape_bytes=new,
            measured_batch=line.measured_batch if line else 0,
            measured=tuple(point.batch for point in line.points) if line and not line.elsewhere else (),
            partial_bytes=line.partial_bytes if line else 0,
            unreserved_bytes=_unreserved_bytes(workload, profile, module, new),
            line=line,
        )

    def _divisions(self, workload: Workload, profile: Profile, budget: Budget) -> list[Blockwise]:
        """Local losses and divisions into measured modules that fit, best first.

        At the batch size wanted fewer modules come first, then the local loss that is expected to be more accurate. One
        unit per module follows, the leanest loss first, and then divisions at smaller batches.
        """
        count, losses = len(profile.units) - 1, self._losses()
        even = [replace(self, local_loss=loss, modules=even_modules(count, self._fixed_units or 1)) for loss in losses]
        if self._fixed_units is not None and not _is_open(self.local_loss):
            return even

        def divided(batch: int) -> list[Blockwise]:
            found = []
            for rank, loss in enumerate(losses):
                fitting = _fitting_modules(profile_of(profile, loss), workload, budget, batch)
                for modules in fastest_divisions(count, fitting):
                    found.append((len(modules), rank, replace(self, local_loss=loss, modules=modules)))
            return [each for _, _, each in sorted(found, key=lambda each: each[:2])]

        return [*divided(_wanted_batch(workload)), *even[::-1], *divided(1)[::-1]]

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Blockwise]:
        """The blocks of Algorithm 1 after residency repair, with a cache; also without one if it does not fit."""
        if self.cache != "auto":
            yield from self._with_blocks(workload, profile, hardware, budget)
            return
        for cached in replace(self, cache="always")._with_blocks(workload, profile, hardware, budget):
            yield cached
            storage = cached.estimate(workload, profile, hardware).storage_bytes
            if budget.storage_bytes is not None and storage > budget.storage_bytes:
                yield from replace(self, cache="never")._with_blocks(workload, profile, hardware, budget)

    def _with_blocks(
        self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget
    ) -> Iterator[Blockwise]:
        """The division with the fewest modules that has blocks within the budget."""
        for option in self._divisions(workload, profile, budget):
            kept = profile_of(profile, option.local_loss).kept
            if all(_probe_name(profile, module) in kept for module in option.modules):
                found = option._in_blocks(workload, profile, hardware, budget)
                if found is not None:
                    yield found
                    return

    def _in_blocks(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Blockwise | None:
        profile = profile_of(profile, self.local_loss)
        limit = min(workload.batch_limit, workload.train_count)
        residency = self._residency(workload, profile, budget)
        most = UNITS_BEFORE_STOP if self.block_units is None and self.saturation_stop else self.block_units
        blocks = make_blocks(residency, limit, self.rho, adaptive_batch=self.adaptive_batch, most_units=most)
        if not blocks:
            return None
        found = tuple((block.first, block.last, block.batch_size) for block in blocks)
        largest = max(residency.bytes_of(block) for block in blocks)
        headroom = min(largest, step_headroom(budget, profile.base_bytes + _leftover_bytes(residency)))
        test_batch = self._tested_images(profile, hardware, headroom, limit)  # no more memory than training
        return replace(self, blocks=found, wanted_batch=_wanted_batch(workload), test_batch=test_batch)

    def _residency(self, workload: Workload, profile: Profile, budget: Budget) -> Residency:
        headroom = step_headroom(budget, profile.base_bytes)
        needs = self._needs(workload, profile)
        return Residency(needs, profile.base_bytes, headroom, self.residency == "all", self.cache == "never")

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured lines: one phase per block and one for the final test."""
        profile = profile_of(profile, self.local_loss)
        blocks = [Block(*block) for block in self.blocks]
        probes = [_probe_name(profile, module) for module in self._divided(profile)]
        seconds = [
            [profile.lines[probes[module]].seconds_at(block.batch_size) / block.batch_size for module in block.units]
            for block in blocks
        ]
        residency = self._residency(workload, profile, Budget())
        tested = bytes_of_test(self._tested_layers(profile, hardware), self.test_batch)
        peak = with_safety(profile.base_bytes + _leftover_bytes(residency, unit_batches(blocks)), tested)
        images = workload.test_count + workload.val_count
        final = Phase("exit", peak, EVALUATION_SHARE * sum(map(sum, seconds)) * images, self.test_batch, steps=False)
        return estimate_blocks(residency, blocks, seconds, workload, self.views, final)

    def _tested_layers(self, profile: Profile, hardware: Hardware) -> list[LayerCost]:
        """What layers hold that may need most in the test of an exit."""
        of_units = ((unit.weight_bytes, max(unit.saved_bytes, 3 * unit.output_bytes)) for unit in profile.units)
        layers = dict(self.exit_costs).get(self.local_loss) or [*of_units]  # earlier plans do not know them
        return in_memory(layers, profile, hardware.device)

    def _tested_images(self, profile: Profile, hardware: Hardware, headroom: float, limit: int) -> int:
        """Images at once in the test of an exit."""
        layers = self._tested_layers(profile, hardware)
        fitting = min(int(min(headroom - weights, 2**62) // max(size, 1)) for weights, size in layers)
        free = max(weights for weights, _ in layers) // max(1, *(size for _, size in layers))
        return max(1, min(limit, fitting, max(TEST_IMAGES, free)))

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed: the unit that needs most memory, and the smallest budget that suffices.

        A profile in which larger modules fit has no probes of single units; then the largest of its modules counts.
        """
        names = [_probe_name(profile, each) for each in even_modules(len(profile.units) - 1, self._fixed_units or 1)]
        by_loss = [(loss, profile_of(profile, loss)) for loss in reversed(self._losses())]  # the leanest first
        by_loss = [pair for pair in by_loss if any(map(_is_module, pair[1].floors))]
        loss, profile = next((pair for pair in by_loss if all(name in pair[1].floors for name in names)), by_loss[0])
        if any(name not in profile.floors for name in names):
            names = [name for name in profile.floors if _is_module(name)]
        kept = {name: profile.kept[name] if self.residency == "all" else 0 for name in names}
        floors = {name: profile.floors[name] + sum(kept.values()) - kept[name] for name in names}
        largest = max(floors, key=lambda name: floors[name])
        smallest = max(smallest_budget(profile, floors[largest]), (budget.memory_bytes or 0) + 1_000_000)
        reason = f"unit {largest.removeprefix(PROBE_PREFIX)} needs {smallest / 1e6:.0f} MB for one sample"
        if _is_open(self.local_loss):
            reason += f" with {loss}, the leanest of {', '.join(local_losses(self.local_loss))}"
        tested = bytes_of_test(replace(self, local_loss=loss)._tested_layers(profile, hardware), 1)
        return Shortfall((reason,), max(smallest, smallest_budget(profile, TRAINED_BLOCKS_BYTES + tested)))

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train one block after another."""
        run.profile = _in_order(profile_of(run.profile, self.local_loss))
        return Controller(self, self._layout(chain, run.workload, self.modules), data, run).fit()


def _is_open(local_loss: str) -> bool:
    """Whether several local losses are considered under this name."""
    return len(local_losses(local_loss)) > 1


def _wanted_batch(workload: Workload) -> int:
    """Batch size that every module must reach to be preferred over leaner ones."""
    return min(MODULE_BATCH, workload.batch_limit, workload.train_count)


def _priced_batch(workload: Workload) -> int:
    """Batch size of passes on the meta device; one image is too few for some batch norms."""
    return max(2, _wanted_batch(workload))


def _unreserved_bytes(workload: Workload, profile: Profile, module: Module, shape_bytes: float) -> float:
    """The part of the reserve for kernels that a module's step may use.

    The first step generates the kernels, and the optimizer has no state yet, so the kernels have the state's room. The
    backward pass makes the state from the last layer to the first. Where units run again, the peak may come when most
    of it is there, so nothing of the reserve is used.
    """
    first, last, schedule = module
    trained = 0 if schedule else sum(stats.trained for stats in profile.units[first : last + 1])
    state = 4 * trained * workload.optimizer.state_per_parameter
    needed = reserved_bytes(state, PASS_SHARE * shape_bytes)
    return max(RESERVED_BYTES - needed, 0.0) / (1 + full_safety().share)


def _fitting_modules(profile: Profile, workload: Workload, budget: Budget, batch: int) -> dict[Module, float]:
    """Seconds per image at the batch size wanted, of the measured modules that fit at another batch size."""
    numbers = {stats.name: number for number, stats in enumerate(profile.units)}
    measured = {_module_of_probe(name, numbers): line for name, line in profile.lines.items() if _is_module(name)}
    headroom, wanted = step_headroom(budget, profile.base_bytes), _wanted_batch(workload)
    return {
        module: line.seconds_at(wanted) / wanted
        for module, line in measured.items()
        if line.bytes_at(batch) <= headroom + _unreserved_bytes(workload, profile, module, line.shape_bytes)
    }


def _probe_name(profile: Profile, module: Module) -> str:
    first, last, schedule = module
    return module_probe_name([stats.name for stats in profile.units[first : last + 1]], schedule)


def _in_order(profile: Profile) -> Profile:
    """The profile with the lines of modules in the order of units, and other lines before them."""
    numbers = {stats.name: number for number, stats in enumerate(profile.units)}
    lines = sorted(
        profile.lines.items(),
        key=lambda item: _module_of_probe(item[0], numbers) if _is_module(item[0]) else (-1, 0, ""),
    )
    return replace(profile, lines=dict(lines))


def _is_module(probe: str) -> bool:
    return probe.startswith(PROBE_PREFIX)


def _module_of_probe(probe: str, numbers: Mapping[str, int]) -> Module:
    """The module that a probe was made for, by the numbers of units."""
    names, _, schedule = probe.removeprefix(PROBE_PREFIX).partition(" ")
    first, _, last = names.partition("..")
    return numbers[first], numbers[last or first], schedule


def _leftover_bytes(residency: Residency, batches: Sequence[int] = ()) -> float:
    """Bytes that trained blocks leave in memory during the final test, of units at these batch sizes if known."""
    count = len(residency.needs)
    return max(TRAINED_BLOCKS_BYTES, residency.leftover_bytes(count, count, batches)) + FRAGMENTS_BYTES


def rebuild_exit(chain: Chain, structure: dict[str, Any], classes: int, state: Mapping[str, Tensor]) -> nn.Module:
    """Build the units up to the exit, with its local loss as classifier; the full network without an exit.

    The structure holds ``local_loss`` and the index of the ``exit``. The saved state, of any shapes, is not read.
    """
    if not structure:
        return chain.to_module()
    exit_unit = structure["exit"]
    if not isinstance(exit_unit, int) or exit_unit < 0:
        raise ValueError(f"the exit must be the number of a unit, not {exit_unit!r:.40}")
    return Layout.of(chain, structure["local_loss"], classes).exit_model(exit_unit)
