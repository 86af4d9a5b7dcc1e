"""The strategy ``sidenet``: Rep-Net with a pruned backbone (Yoosefi et al.), and what it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

from torch import fx

from snugfit._chain import Chain, classifier_names
from snugfit._core.budget import Budget
from snugfit._core.cost import Cost, Phase, Shortfall
from snugfit._core.hardware import Hardware
from snugfit._core.profile import ProbeLine, Profile
from snugfit._core.record import Record
from snugfit._core.request import StrategyOptions
from snugfit._core.workload import Workload
from snugfit._training.run import Run
from snugfit._training.split import TrainingData
from snugfit._training.task import needs_classes
from snugfit.profiling import Probe
from snugfit.strategies.full_network import network_probe
from snugfit.strategies.memory_estimates import (
    available_headroom,
    forward_images,
    smallest_budget,
    step_headroom,
    with_safety,
)
from snugfit.strategies.micro_batch import divisors, hold_modes, line_name
from snugfit.strategies.sidenet.configurations import PREFIX, Configuration, leanest
from snugfit.strategies.sidenet.frozen import Frozen
from snugfit.strategies.sidenet.lower_bounds import Looks, Way
from snugfit.strategies.sidenet.network import make_trainer
from snugfit.strategies.sidenet.ranked_configurations import Option, best, option_of
from snugfit.strategies.sidenet.retraining import (
    MOST_IMAGES,
    RETRAIN,
    Retraining,
    retrain_phase,
    retraining_probe,
)
from snugfit.strategies.sidenet.runner import fit_sidenet
from snugfit.strategies.sidenet.settings import SidenetSettings
from snugfit.surgery import attach_side_network

MARGIN_BYTES = 1_000_000
"""By how much the headroom of a step may be smaller once everything is measured: whether another probe is needed is
judged with that much less. Every further one leaves about as much behind, and in the end what fitted fits no more."""

LOOK_BYTES = 300_000
"""What looking at a way leaves behind: the code of its graphs. Fewer are looked at in a budget that holds none."""

LEFT_BY_RETRAINING = 4_000_000
"""What a thousand retraining steps leave behind that the one of a probe does not: a run was 0.5 MB above its prediction
without this, although that holds a safety of 6.6 MB."""

FINE_TUNE = "fine-tune"


@dataclass(frozen=True)
class Sidenet(SidenetSettings):
    """A frozen network and a small one beside it (Rep-Net), which needs few maps for the backward pass."""

    @staticmethod
    def leaner(options: StrategyOptions) -> Iterator[dict[str, Any]]:
        """Settings of those that the user left open that need less memory, to be tried where nothing fits."""
        yield from leanest(options)

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """The optimizer must leave frozen statistics alone, and there must be something to train.

        Raises:
            ModelError: a side network cannot be attached, or the network not be pruned as asked.
        """
        if reasons := needs_classes(workload) + chain.bypassed_hooks():
            return reasons
        if workload.optimizer.averages:
            reasons.append("schedulefree renews the statistics of BatchNorm, which stay frozen here; use sgd or adamw")
        if not classifier_names(chain):
            reasons.append("no parameter of the model requires a gradient: there is no classifier to train")
        if self.scheme == "rep-net":
            width = self.tried[0].side_width
            attach_side_network(cast(fx.GraphModule, chain.to_module()), chain.input_shape, width=width)
            if self.prune not in ("auto", "off"):
                _ = self._frozen(chain, self.tried[0]).widths
        return reasons

    def _frozen(self, chain: Chain, configuration: Configuration) -> Frozen:
        return Frozen(
            chain, self.scheme, configuration.side_width, "on" if self.prune in ("auto", "off") else self.prune
        )

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """A step in each configuration, with gradients applied at once and with gradients held; and retraining.

        They are lazy: a configuration is measured only if it may lose less than what was found to fit.
        """
        known = {width: self._frozen(chain, Configuration(width)) for width in {each.side_width for each in self.tried}}
        ways: dict[Way, Probe] = {}
        for each, hold in sorted(self._ways(workload), key=lambda way: _least_loss(workload, *way)):
            make = make_trainer(each, known[each.side_width], self.side_lr)
            probe = network_probe(each.probe, chain, workload, hardware.device, make, hold=hold)
            sizes = (probe.batch_limit,) if self.accumulate and not hold else probe.sizes
            ways[each, hold] = replace(probe, sizes=sizes, floor=cache(probe.floor), network=PREFIX)
        first = next((each for each, _ in ways if each.pruned), None)
        retraining = None
        if first is not None:
            how = Retraining(known[first.side_width], self.prune_importance, self.retrain_epochs)
            retraining = retraining_probe(how, chain, workload, hardware.device)
        looks = Looks(ways, retraining, lambda each: _serves(each, known[each.side_width]))
        probes: list[Probe] = []
        for way, probe in ways.items():
            needed = partial(self._needed, workload, looks, way)
            if retraining is not None and way[0].pruned and all(each.name != RETRAIN for each in probes):
                probes.append(replace(retraining, needed=needed))
            probes.append(replace(probe, needed=needed))
        return probes

    def _ways(self, workload: Workload) -> list[Way]:
        """Every configuration, with gradients applied at once and, where a batch has parts, with gradients held."""
        parts = self.accumulate and workload.effective_batch > 1
        return [(each, hold) for each in self.tried for hold in hold_modes(parts)]

    def _needed(
        self, workload: Workload, looks: Looks, way: Way, lines: Mapping[str, ProbeLine], available: float
    ) -> bool:
        """Whether a way may lose less accuracy than what was measured to fit, and may fit itself.

        What measuring leaves behind must not be what that lacks in the end.
        """
        headroom = available_headroom(available)
        found = best(self._options(workload, lines, headroom - MARGIN_BYTES))
        if found is not None:
            after = best(self._options(workload, lines, headroom - MARGIN_BYTES - looks.probes[way].growth_bytes))
            if after is None or found.loss < after.loss or _least_loss(workload, *way) >= found.loss - 1e-6:
                return False
        return looks.serves(way[0]) and looks.may_fit(way, headroom, lines)

    def _options(self, workload: Workload, lines: Mapping[str, ProbeLine], headroom: float) -> Iterator[Option]:
        for each in self.tried:
            left = headroom - LEFT_BY_RETRAINING if each.pruned else headroom
            if not each.pruned or self._retraining(workload, lines, left, 0) is not None:
                option = option_of(each, lines, workload, left, accumulate=self.accumulate)
                if option is not None:
                    yield option

    def _retraining(
        self, workload: Workload, lines: Mapping[str, ProbeLine], headroom: float, resident_bytes: int
    ) -> Phase | None:
        """The phase in which a pruned network learns anew; None where it was not measured or does not fit."""
        images = MOST_IMAGES if self.retrain_data is not None else workload.train_count
        line = lines.get(RETRAIN)
        if line is None:
            return None
        return retrain_phase(line, headroom, resident_bytes, images, self.retrain_epochs)

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Sidenet]:
        """What fits and is expected to lose the least accuracy; the fastest of those that lose the same."""
        headroom = step_headroom(budget, profile.base_bytes)
        found = best(self._options(workload, profile.lines, headroom))
        if found is not None:
            retraining = self._retraining(workload, profile.lines, headroom - LEFT_BY_RETRAINING, 0)
            yield self._taking(found, retraining if found.configuration.pruned else None)

    def _taking(self, option: Option, retraining: Phase | None) -> Sidenet:
        taken = option.configuration
        return replace(
            self,
            side_width=taken.side_width or None,
            prune=("off" if not taken.pruned else "on" if self.prune == "auto" else self.prune),
            sample_wise="on" if taken.by_sample else "off",
            weight_storage="int8" if taken.int8 else "float32",
            micro_batch=option.micro.micro_batch,
            micro_batches=option.micro.micro_batches,
            retrain_batch=0 if retraining is None else retraining.batch_size,
        )

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured line of its configuration."""
        line = profile.lines[self.line(self.configuration.probe)]
        passed = forward_images(workload, tracks=self.scheme == "rep-net")  # the side network's norms
        epoch = self.epoch_seconds(line, workload.train_count, passed)
        resident = profile.base_bytes + LEFT_BY_RETRAINING * self.configuration.pruned
        peak = with_safety(resident, line.bytes_at(self.micro_batch))
        phases = [Phase(FINE_TUNE, peak, epoch * workload.epochs, self.micro_batch)]
        if self.configuration.pruned:
            headroom = profile.lines[RETRAIN].bytes_at(self.retrain_batch)
            retraining = self._retraining(workload, profile.lines, headroom, resident)
            phases = [retraining, *phases] if retraining else phases
        peak, seconds = max(phase.peak_bytes for phase in phases), sum(phase.seconds for phase in phases)
        return Cost(peak, epoch, seconds, phases=tuple(phases))

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and the smallest memory budget that would do."""
        looks = len({replace(each, by_sample=False) for each in self.tried})
        floor = min(self._floors(workload, profile)) + looks * LOOK_BYTES
        smallest = max(smallest_budget(profile, floor), (budget.memory_bytes or 0) + 1_000_000)
        return Shortfall((f"one sample needs {smallest / 1e6:.0f} MB",), smallest)

    def _floors(self, workload: Workload, profile: Profile) -> list[int]:
        """Tensor bytes of the ways that were looked at, and of what goes before where channels are removed.

        Where a batch has parts, those of ways that hold gradients: the others are for the whole batch.
        """
        found = {
            (each, hold): max(profile.floors[name], profile.floors.get(RETRAIN, 0) if each.pruned else 0)
            for each, hold in self._ways(workload)
            if (name := line_name(each.probe, hold=hold)) in profile.floors
        }
        return [floor for (_, hold), floor in found.items() if hold] or list(found.values())

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
        return fit_sidenet(self, chain, data, run)


def _serves(configuration: Configuration, frozen: Frozen) -> bool:
    """Whether there are blocks to run image by image, and channels to remove, where a configuration does."""
    return (not configuration.by_sample or bool(frozen.large)) and (not configuration.pruned or frozen.can_prune)


def _least_loss(workload: Workload, configuration: Configuration, hold: bool) -> float:
    """What a configuration is expected to lose with the whole batch at once, or with the largest part of it."""
    batch = workload.effective_batch
    return configuration.loss_at(([1, *divisors(batch)[:-1]] if hold else [batch])[-1], batch)
