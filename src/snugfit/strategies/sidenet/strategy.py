"""The strategy ``sidenet``: Rep-Net with a pruned backbone (Yoosefi et al.), and its baselines."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import cast

from torch import fx

from snugfit._chain import Chain, classifier_names
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Phase, Shortfall
from snugfit._core.profile import ProbeLine, Profile
from snugfit._core.record import Record
from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import save_model
from snugfit._training.finalize import Outcome, evaluate_model, make_record
from snugfit._training.network import NetworkTrainer
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit._training.task import needs_classes
from snugfit.lean import FloatState
from snugfit.profiling import Probe
from snugfit.strategies.full_network import load_network, network_probe, network_shortfall, train_network
from snugfit.strategies.memory_estimates import (
    available_headroom,
    forward_images,
    passing_kernel_bytes,
    step_headroom,
    with_safety,
)
from snugfit.strategies.micro_batch import choose_batch, hold_modes, line_name
from snugfit.strategies.sidenet.configurations import (
    PREFIX,
    Configuration,
    FittedConfiguration,
    LowerBounds,
    SidenetSettings,
    Variant,
)
from snugfit.strategies.sidenet.frozen import FrozenNetwork
from snugfit.strategies.sidenet.network import make_trainer, restore_layers
from snugfit.strategies.sidenet.retraining import (
    PASS_IMAGES,
    RETRAIN,
    Retraining,
    load_pruned,
    prune_and_retrain,
    retrain_phase,
    retraining_probe,
)
from snugfit.surgery import attach_side_network

MARGIN_BYTES = 1_000_000
"""Margin for the headroom of a step. Each further probe leaves about as much memory behind, so that a configuration
that fitted may no longer fit. Whether another probe is needed is decided with this margin."""
GRAPH_BYTES = 300_000
"""Memory that a lower bound leaves behind: the code of its graph. A budget in which nothing fits needs fewer bounds."""
LEFT_BY_RETRAINING = 4_000_000
"""Memory that a thousand retraining steps leave behind, unlike the one step of a probe. Without this margin, a run was
0.5 MB above its prediction, although that includes a safety of 6.6 MB."""


@dataclass(frozen=True)
class Sidenet(SidenetSettings):
    """A frozen network with a small side network (Rep-Net), which keeps few feature maps for the backward pass."""

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why it cannot train this model: it is not divided into units, or no classifier trains.

        Raises:
            ModelError: a side network cannot be attached, or the network cannot be pruned by --prune.
        """
        if reasons := needs_classes(workload) + chain.reasons_against_units():
            return reasons
        reasons = chain.reasons_against_freezing()
        if not classifier_names(chain):
            reasons.append("no parameter of the model requires a gradient: there is no classifier to train")
        if self.scheme == "rep-net":
            width = self.candidates[0].side_width
            attach_side_network(cast(fx.GraphModule, chain.to_module()), chain.input_shape, width=width)
            if self.prune not in ("auto", "off"):
                _ = self._frozen(chain, self.candidates[0]).widths
        return reasons

    def _frozen(self, chain: Chain, configuration: Configuration) -> FrozenNetwork:
        prune = "on" if self.prune in ("auto", "off") else self.prune
        return FrozenNetwork(chain, self.scheme, configuration.side_width, prune)

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """A step of each configuration, with gradients applied at once and with gradients held; and retraining.

        They are lazy: a configuration is measured only if it may lose less accuracy than the measured ones that fit.
        """
        known = {each.side_width: self._frozen(chain, each) for each in self.candidates}
        variants: dict[Variant, Probe] = {}
        for each, hold in sorted(self._variants(workload), key=lambda variant: _least_loss(workload, *variant)):
            make = make_trainer(each, known[each.side_width], self.side_lr)
            probe = network_probe(each.probe, chain, workload, hardware.device, make, hold=hold)
            sizes = (probe.batch_limit,) if self.accumulate and not hold else probe.sizes
            variants[each, hold] = replace(probe, sizes=sizes, floor=cache(probe.floor), network=PREFIX, kernels="")
        first = next((each for each, _ in variants if each.pruned), None)
        retraining = None
        if first is not None:
            how = Retraining(known[first.side_width], self.prune_importance, self.retrain_epochs)
            retraining = retraining_probe(how, chain, workload, hardware.device)
        bounds = LowerBounds(variants, retraining, lambda each: _applies(each, known[each.side_width]))
        probes: list[Probe] = []
        for variant, probe in variants.items():
            needed = partial(self._needed, workload, bounds, variant)
            if retraining is not None and variant[0].pruned and all(each.name != RETRAIN for each in probes):
                probes.append(replace(retraining, needed=needed))
            probes.append(replace(probe, needed=needed))
        return probes

    def _variants(self, workload: Workload) -> list[Variant]:
        """Every configuration with gradients applied at once and, if batches may accumulate, with gradients held."""
        parts = self.accumulate and workload.effective_batch > 1
        return [(each, hold) for each in self.candidates for hold in hold_modes(parts)]

    def _needed(
        self,
        workload: Workload,
        bounds: LowerBounds,
        variant: Variant,
        lines: Mapping[str, ProbeLine],
        available: float,
    ) -> bool:
        """Whether a variant may fit and lose less accuracy than the measured ones that fit.

        The memory that its measurement leaves behind must not prevent the best of those from fitting.
        """
        headroom = available_headroom(available)
        found = _best(self._fitting(workload, lines, headroom - MARGIN_BYTES))
        if found is not None:
            after = _best(self._fitting(workload, lines, headroom - MARGIN_BYTES - bounds.probes[variant].growth_bytes))
            if after is None or found.loss < after.loss or _least_loss(workload, *variant) >= found.loss - 1e-6:
                return False
        return bounds.applies(variant[0]) and bounds.may_fit(variant, headroom, lines)

    def _fitting(
        self, workload: Workload, lines: Mapping[str, ProbeLine], headroom: float
    ) -> Iterator[FittedConfiguration]:
        batch = workload.effective_batch
        for each in self.candidates:
            left = headroom - LEFT_BY_RETRAINING if each.pruned else headroom
            if each.pruned and self._retraining(workload, lines, left, 0) is None:
                continue
            micro = choose_batch(lines, each.probe, left, workload, accumulate=self.accumulate)
            if micro is not None:
                seconds = micro.seconds(lines[micro.line(each.probe)]) * (batch / micro.micro_batch)
                yield FittedConfiguration(each, micro, each.loss_at(micro.micro_batch, batch), seconds)

    def _retraining(
        self, workload: Workload, lines: Mapping[str, ProbeLine], headroom: float, resident_bytes: int
    ) -> Phase | None:
        """The phase that retrains a pruned network; None if it was not measured or does not fit."""
        images = PASS_IMAGES if self.retrain_data is not None else workload.train_count
        line = lines.get(RETRAIN)
        if line is None:
            return None
        return retrain_phase(line, headroom, resident_bytes, images, self.retrain_epochs)

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Sidenet]:
        """The configuration that fits with the least expected loss of accuracy; the fastest among equals."""
        headroom = step_headroom(budget, profile.base_bytes)
        found = _best(self._fitting(workload, profile.lines, headroom))
        if found is None:
            return
        chosen, retraining = found.configuration, None
        if chosen.pruned:
            retraining = self._retraining(workload, profile.lines, headroom - LEFT_BY_RETRAINING, 0)
        yield replace(
            self,
            side_width=chosen.side_width or None,
            prune=("off" if not chosen.pruned else "on" if self.prune == "auto" else self.prune),
            sample_wise="on" if chosen.by_sample else "off",
            weight_storage="int8" if chosen.int8 else "float32",
            micro_batch=found.micro.micro_batch,
            micro_batches=found.micro.micro_batches,
            retrain_batch=0 if retraining is None else retraining.batch_size,
        )

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured line of its configuration."""
        line = profile.lines[self.line(self.configuration.probe)]
        passed = forward_images(workload, tracks=self.scheme == "rep-net")  # the side network's norms
        epoch = self.epoch_seconds(line, workload, passed)
        resident = profile.base_bytes + LEFT_BY_RETRAINING * self.configuration.pruned
        resident += passing_kernel_bytes(workload, self.micro_batch, line.shape_bytes)
        peak = with_safety(resident, self.step_bytes(line, workload))
        phases = [Phase("fine-tune", peak, epoch * workload.epochs, self.micro_batch)]
        if self.configuration.pruned:
            headroom = profile.lines[RETRAIN].bytes_at(self.retrain_batch)
            retraining = self._retraining(workload, profile.lines, headroom, resident)
            phases = [retraining, *phases] if retraining else phases
        peak, seconds = max(phase.peak_bytes for phase in phases), sum(phase.seconds for phase in phases)
        return Cost(peak, epoch, seconds, phases=tuple(phases))

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and the smallest sufficient memory budget."""
        bounds = len({replace(each, by_sample=False) for each in self.candidates})
        floor = min(self._floors(workload, profile)) + bounds * GRAPH_BYTES
        return network_shortfall(profile, floor, budget, workload)

    def _floors(self, workload: Workload, profile: Profile) -> list[int]:
        """Lower bounds in tensor bytes of the variants, retraining included for pruned ones.

        If batches may be accumulated, those of variants that hold gradients; the others are for the full batch.
        """
        found = {
            (each, hold): max(profile.floors[name], profile.floors.get(RETRAIN, 0) if each.pruned else 0)
            for each, hold in self._variants(workload)
            if (name := line_name(each.probe, hold=hold)) in profile.floors
        }
        return [floor for (_, hold), floor in found.items() if hold] or list(found.values())

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Prune and retrain if planned, then fine-tune."""
        configuration = self.configuration
        frozen = FrozenNetwork(chain, self.scheme, configuration.side_width, self.prune)
        if configuration.pruned and run.position.phase == 0:
            retraining = Retraining(frozen, self.prune_importance, self.retrain_epochs)
            prune_and_retrain(retraining, copy.deepcopy(chain), data, run)
        make = make_trainer(configuration, frozen, self.side_lr, lambda module: load_pruned(module, run))

        def load(micro_batches: int) -> NetworkTrainer:
            fresh = copy.deepcopy(chain)  # its parameters are frozen below, and its layers may shrink
            return make(fresh, load_network(fresh, run), run.workload, micro_batches)

        trained = train_network(load, data, run, micro_batches=self.micro_batches, accumulates=self.holds_gradients)
        module, phase = trained.trainer.module, trained.phase
        evaluation = evaluate_model(module.eval(), data, run, phase.batch_size)
        state = FloatState(restore_layers(module))
        save_model(run.folder, state, run.manifest)
        run.end_phase(phase, run.workload.epochs, trained.steps)
        buffers = {name for name, _ in module.named_buffers()}
        kept = sum(tensor.numel() for name, tensor in state.items() if name not in buffers)
        widths = frozen.width_changes if configuration.pruned else {}
        settings = {**asdict(self), **asdict(trained.settings), "widths": widths}
        parameters = {"full": chain.parameters, "trained_model": kept}
        return make_record(run, data, Outcome(self.name, settings, evaluation, parameters))


def _applies(configuration: Configuration, frozen: FrozenNetwork) -> bool:
    """Whether the network has blocks to run image by image and channels to remove, as a configuration requires."""
    runs_by_sample = not configuration.by_sample or bool(frozen.per_sample_blocks)
    return runs_by_sample and (not configuration.pruned or frozen.can_prune)


def _least_loss(workload: Workload, configuration: Configuration, hold: bool) -> float:
    """Expected loss of a configuration with the full batch at once or, with held gradients, its largest part."""
    batch = workload.effective_batch
    return configuration.loss_at(-(-batch // 2) if hold else batch, batch)


def _best(fitting: Iterable[FittedConfiguration]) -> FittedConfiguration | None:
    """The configuration with the least expected loss of accuracy; the fastest among equals."""
    return min(fitting, key=lambda each: (round(each.loss, 6), each.seconds), default=None)
