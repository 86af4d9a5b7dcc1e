"""ElasticTrainer: train only the most important tensors, within a fraction of a full step's time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from snugfit._chain import Chain, classifier_names
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.plan import Cost, Phase, Shortfall
from snugfit._core.profile import Profile
from snugfit._core.record import Record
from snugfit._core.workload import Workload
from snugfit._quantities import MB
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit._training.task import needs_classes
from snugfit.profiling import Probe, TensorProbe
from snugfit.selection.choice import choose
from snugfit.strategies.elastic.budgets import ElasticSettings, budget_for, importance_peak, largest_chunk
from snugfit.strategies.elastic.probes import FULL, HEAD, IMPORTANCE, ElasticProbes
from snugfit.strategies.elastic.runner import fit_elastic
from snugfit.strategies.memory_estimates import smallest_budget, step_headroom
from snugfit.strategies.micro_batch import VALIDATION_SHARE, divisors

DEFAULT_RATIO = 0.5
"""Default rho (ElasticTrainer section 8.1)."""


@dataclass(frozen=True)
class Elastic(ElasticSettings):
    """Tensor selection at run time (ElasticTrainer), and the fine-tuning methods that serve as baselines."""

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why the model is unsupported, such as no tensor to select."""
        if chain.undivided or chain.inputs:
            return chain.reasons_against_units()
        reasons = needs_classes(workload) + chain.reasons_against_units() + chain.reasons_against_freezing()
        named = (pair for unit in chain.all_units for pair in unit.module.named_parameters())
        trainable = {name for name, parameter in named if parameter.requires_grad}
        if not trainable:
            reasons.append("no parameter of the model requires a gradient: nothing to select")
        elif self.selects and trainable <= set(classifier_names(chain)):
            reasons.append("only the classifier's parameters require gradients; train them with --scheme head")
        return reasons

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe | TensorProbe]:
        """Probes of steps with the fewest tensors and with all, of the importance pass, and of every operator."""
        probes = ElasticProbes(chain, workload, hardware.device, self.lean)
        return probes.all(self.importance_batch if self.selects else None)

    def propose(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Iterator[Elastic]:
        """The largest micro-batch at which memory allows nearly the selection that time allows."""
        if profile.tensors is None or HEAD not in profile.lines:
            return
        ratio = (budget.time_ratio or DEFAULT_RATIO) if self.selects else None
        limit = workload.effective_batch
        chunk = largest_chunk(profile, budget, divisors(self.importance_batch)) if self.selects else 1
        if not chunk:
            return
        filled = replace(self, time_ratio=ratio, budget_bytes=budget.memory_bytes, chunk=chunk)
        options = [filled.at(size, limit) for size in reversed(divisors(limit))] if self.accumulate else []
        best, best_share = None, 0.0
        for option in options or [filled.at(size, size) for size in range(limit, 0, -1)]:
            share = option._time_share(workload, profile)
            if share > best_share * 1.02:
                best, best_share = option, share
            if best_share > 0.98:
                break
        if best is not None:
            yield best

    def _time_share(self, workload: Workload, profile: Profile) -> float:
        """Share of the updates' time in a selection by time alone that one within both budgets has; 0: does not fit."""
        costs, ratio = self.costs(workload, profile), self.time_ratio or 1.0
        if not self.selects:
            fits = costs.peak(self.fixed(costs.memory)) <= step_headroom(self.budget, profile.base_bytes)
            return 1.0 if fits else 0.0
        if costs.times.smallest_ratio > ratio:
            return 0.0
        network, headroom = costs.times.network, costs.headroom(self.budget, ratio)
        if self.budget_bytes is None:
            return 1.0
        free = choose(costs.times, costs.memory, network.t_dw, replace(headroom, bytes=None))
        bound = choose(costs.times, costs.memory, network.t_dw, headroom)
        others = ~network.head
        return float(network.t_dw[bound & others].sum() / max(network.t_dw[free & others].sum(), 1e-12))

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and the smallest sufficient time ratio or memory budget."""
        ratio = self.smallest_ratio(workload, profile)
        asked = budget.time_ratio or DEFAULT_RATIO
        if ratio is not None and ratio > 1:
            reason = f"with the classifier and one other tensor a step takes {ratio:.3f} of a full step"
            return Shortfall((f"{reason}; take --strategy backprop",))
        if ratio is not None and ratio > asked:
            reason = f"rho {asked:g} is too small: with the classifier and one other tensor a step takes {ratio:.3f}"
            return Shortfall((reason,), smallest_ratio=ratio)
        smallest = self._smallest_bytes(workload, profile, budget)
        return Shortfall((f"one sample needs {smallest / 1e6:.0f} MB",), smallest)

    def _smallest_bytes(self, workload: Workload, profile: Profile, budget: Budget) -> int:
        """Smallest memory budget that would do: as measured, or from what is known without measuring."""
        most = HEAD if self.selects or self.scheme == "head" else FULL
        lines = {most, IMPORTANCE} if self.selects else {most}
        if profile.tensors is None or not lines <= profile.lines.keys():
            held = sum(unit.parameters * 4 for unit in profile.units) if self.accumulate and most == FULL else 0
            floor = smallest_budget(profile, max(profile.floors[name] for name in lines) + held)
            return max(floor, (budget.memory_bytes or 0) + MB)
        least = self.at(1, workload.effective_batch if self.accumulate else 1)
        costs = least.costs(workload, profile)
        if not self.selects:
            return budget_for(costs.predicted_peak(self.fixed(costs.memory)), budget.memory_bytes)
        chunk = profile.lines[IMPORTANCE].smallest_batch
        peak = costs.min_peak(budget.time_ratio or DEFAULT_RATIO, costs.times.everything) or 0
        return budget_for(max(peak, importance_peak(profile, chunk)), budget.memory_bytes)

    def smallest_ratio(self, workload: Workload, profile: Profile) -> float | None:
        """Smallest rho with which a tensor outside the classifier trains, rounded up; None if rho does not apply."""
        if not self.selects or profile.tensors is None:
            return None
        limit = workload.effective_batch
        smallest = replace(self, micro_batch=limit).costs(workload, profile).times.smallest_ratio
        return math.ceil(smallest * 1000) / 1000 if math.isfinite(smallest) else smallest

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Predicted cost; the peak is that of the largest selection that time and memory allow."""
        costs = self.costs(workload, profile)
        if self.selects:
            ratio = self.time_ratio or 1.0
            peak, step = costs.max_peak(self.budget, ratio), ratio * costs.times.full
            peak = max(peak, importance_peak(profile, self.chunk))
            ranking = profile.lines[IMPORTANCE].seconds_at(self.chunk)
        else:
            mask = self.fixed(costs.memory)
            peak, step, ranking = costs.predicted_peak(mask), costs.times.step_seconds(mask), 0.0
        batch = self.images(workload)
        steps = max(workload.train_count // batch, 1)
        epoch = step * (steps + VALIDATION_SHARE * workload.val_count / batch)
        phases = tuple(
            Phase(f"interval {index + 1}", peak, ranking + epoch * len(span), self.micro_batch)
            for index, span in enumerate(self.spans(workload.epochs))
        )
        return Cost(peak, epoch, sum(phase.seconds for phase in phases), phases=phases)

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
        return fit_elastic(self, chain, data, run)
