"""A run of ``elastic``: rank, select, train for some epochs, and repeat."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from snugfit._chain import Chain
from snugfit._core.plan import Phase
from snugfit._core.profile import TensorProfile
from snugfit._core.record import IntervalRecord, Record
from snugfit._core.serial import from_data, to_data
from snugfit._storage.tensor_file import save_model
from snugfit._training.dry_run import SPARE_BYTES
from snugfit._training.events import Notice, TensorsSelected
from snugfit._training.finalize import Outcome, evaluate_model, make_record
from snugfit._training.kept_epoch import restore_kept
from snugfit._training.loop import train_phase
from snugfit._training.run import Run
from snugfit._training.seeding import derive_seed, seed_all
from snugfit._training.strategy import TrainingData
from snugfit._training.task import precision_context
from snugfit.errors import MEMORY_ERRORS, BudgetExceededError, DivergedError
from snugfit.memory import is_out_of_memory, release_memory
from snugfit.memory.scratch import ScratchFile, stored_bytes
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.selection.choice import choose, needed_bytes
from snugfit.selection.importance import importance, scratch_bytes
from snugfit.selection.network import Mask
from snugfit.strategies.elastic.budgets import ElasticSettings, importance_peak, nothing_selected
from snugfit.strategies.elastic.drift import drifted, looks_drifted, profile_again, profiling_peak
from snugfit.strategies.elastic.probes import trial_updates
from snugfit.strategies.elastic.pruning import Pruner
from snugfit.strategies.elastic.trainer import TensorTrainer
from snugfit.strategies.full_network import load_network, validate
from snugfit.strategies.memory_estimates import random_batch

_INTERVALS = "intervals"
_PROFILE = "tensors"
_MEASURED = "tensors_measured_before"
_SHRINK = 0.9


def fit_elastic(strategy: ElasticSettings, chain: Chain, data: TrainingData, run: Run) -> Record:
    """Train, evaluate, save, and return the record."""
    if strategy.prunes:
        chain = copy.deepcopy(chain)  # pruning removes channels
    fit = _ElasticRun(strategy, chain, data, run)
    try:
        while fit.unfinished:
            fit.interval()
        restore_kept(fit.trainer, run)  # which a run that was resumed after its last epoch has not done
    finally:
        fit.trainer.release()  # another run of the same plan needs unfrozen tensors
    phase = run.predicted.phases[-1]
    save_model(run.folder, fit.trainer.module.state_dict(), run.manifest)
    evaluation = evaluate_model(fit.trainer.module.eval(), data, run, phase.batch_size)
    kept = sum(parameter.numel() for parameter in fit.trainer.module.parameters())
    parameters = {"full": fit.parameters, "trained_model": kept}
    outcome = Outcome(strategy.name, asdict(strategy), evaluation, parameters)
    return make_record(run, data, replace(outcome, intervals=fit.intervals, tensors=fit.costs.memory.names))


def rank_tensors(
    strategy: ElasticSettings, chain: Chain, trainer: TensorTrainer, data: TrainingData, run: Run
) -> dict[str, float]:
    """Importance by tensor name, on a few training images drawn for this epoch. Weights and optimizer do not change.

    Meanwhile the optimizer's state is in a file. Dropout is off, because different masks also change the loss.
    """
    epoch, workload = run.position.epoch, run.workload
    seed_all(derive_seed(workload.seed, "importance", epoch))
    batch = min(strategy.importance_batch, len(data.train))
    images, labels = next(data.train.epoch(epoch, batch))
    units = [unit.module.eval() for unit in chain.all_units]
    state = trainer.optimizers.state()
    steps = data.train.steps(strategy.micro_batch * strategy.micro_batches)
    factor = run.lr_factor(epoch * steps, steps)
    size = scratch_bytes(units, [unit.input_shape for unit in chain.all_units], batch)
    size += sum(stored_bytes(tensor.shape, tensor.dtype) for tensor in state.values())
    with ExitStack() as stack:
        scratch = stack.enter_context(ScratchFile(run.cache_dir / "importance", size))
        spilled = {name: scratch.store(tensor) for name, tensor in state.items()}
        selected = trainer.selected
        del state
        trainer.optimizers.release()
        release_memory()
        stack.enter_context(run.limit.allow_kernels())
        stack.enter_context(precision_context(images.to(run.device), workload.precision))
        found = importance(
            strategy.importance,
            units,
            images.to(run.device),
            labels.to(run.device),
            chunk=strategy.chunk,
            scratch=scratch,
            update=trial_updates(workload.optimizer, factor, spilled, trainer.parameters.keys()),
        )
        release_memory()
        trainer.restore_state(selected, {name: stored.read() for name, stored in spilled.items()})
    run.tick()
    return {name: value for name, value in found.items() if name in trainer.parameters}


class _ElasticRun:
    """A run with its network in memory and its intervals so far."""

    def __init__(self, strategy: ElasticSettings, chain: Chain, data: TrainingData, run: Run) -> None:
        self.strategy, self.chain, self.data, self.run = strategy, chain, data, run
        notes = run.position.notes
        self.intervals = [from_data(IntervalRecord, each) for each in notes.setdefault(_INTERVALS, [])]
        self.parameters, self.costs = chain.parameters, strategy.costs(run.workload, run.profile)
        if _PROFILE in notes:
            self._use(from_data(TensorProfile, notes[_PROFILE]))
        module, lean = load_network(chain, run), strategy.lean
        self.trainer = TensorTrainer(module, chain.forward, run.workload, strategy.micro_batches, lean=lean)
        self.pruner = Pruner(self.trainer, chain.input_shape, strategy.lasso) if strategy.prunes else None
        if self.pruner is not None and not run.resumed:
            self.pruner.start(data, run, strategy.micro_batch)
        if self.intervals:
            self.trainer.select(self.intervals[-1].tensors)
        else:
            self._warn_without_statistics()
        if run.resumed:
            self.trainer.load_state(run.resumed_tensors)
            if self.pruner is not None:
                self.pruner.start(data, run, strategy.micro_batch)

    def _use(self, tensors: TensorProfile) -> None:
        profile = replace(self.run.profile, tensors=tensors)
        self.costs = self.strategy.costs(self.run.workload, profile)

    def _warn_without_statistics(self) -> None:
        norms = [layer for layer in self.trainer.module.modules() if isinstance(layer, _BatchNorm)]
        if norms and all(norm.running_mean is not None and not norm.running_mean.any() for norm in norms):
            self.run.emit(
                Notice(
                    "BatchNorm does not update its statistics, and these weights have none: elastic fine-tunes "
                    "pre-trained networks, so give --weights."
                )
            )

    @property
    def unfinished(self) -> bool:
        """Whether epochs remain, or the last interval was interrupted after its last epoch."""
        return self.run.position.epoch < self.run.workload.epochs or not self._is_finished()

    def interval(self) -> None:
        """Select tensors, unless done before an interruption, and train for the interval's epochs."""
        run, epoch = self.run, self.run.position.epoch
        if self._is_finished():
            self._start_interval()
        present = self.intervals[-1]
        length = len(self.strategy.spans(run.workload.epochs)[0])
        end = min(present.first_epoch + length, run.workload.epochs)
        name, phases = f"interval {len(self.intervals)}", run.predicted.phases
        planned = phases[min(run.position.phase, len(phases) - 1)]
        least = present.predicted_peak_bytes
        peak = max(least, min(least + planned.kept_bytes, planned.peak_bytes))
        phase = replace(planned, name=name, peak_bytes=peak, kept_bytes=peak - least, units=())
        count = max(len(phases), len(self.intervals))
        steps = self.data.train.steps(phase.batch_size * self.strategy.micro_batches)
        run.start_phase(phase, len(self.intervals) - 1, count, end - present.first_epoch, steps, present.first_epoch)
        while epoch < end and not self.intervals[-1].drifted:
            epochs = range(epoch, epoch + 1)
            train_phase(self.trainer, self.data.train, phase, run, lambda: self._end_epoch(phase), epochs)
            epoch = run.position.epoch
        run.end_phase(phase, epoch - present.first_epoch, steps)
        run.position.start_epoch(epoch)

    def _is_finished(self) -> bool:
        """Whether the last interval, if any, has run all its epochs."""
        return len(self.intervals) <= self.run.position.phase

    def _start_interval(self) -> None:
        """Make and store the next interval's selection, so that it is never repeated."""
        started = time.perf_counter()
        self.trainer.step_seconds.clear()
        profiled = bool(self.intervals) and self.intervals[-1].drifted and self._profile_again()
        pruned = self._prune() if self.intervals else 1.0
        scores = self._importance() if self.strategy.selects else {}
        mask = self._choose(scores)
        network, times = self.costs.memory, self.costs.times
        macs = int(network.macs(mask) * pruned)
        peaks = [self.costs.predicted_peak(mask)]
        if self.strategy.selects:
            peaks.append(importance_peak(self.run.profile, self.strategy.chunk))
        if profiled:
            peaks.append(profiling_peak(self.costs, self.costs.memory.profile.batch))
        self.intervals.append(
            IntervalRecord(
                first_epoch=self.run.position.epoch,
                tensors=network.selected(mask),
                predicted_seconds=times.step_seconds(mask) * pruned,
                full_seconds=times.full,
                macs=macs,
                flops_per_epoch=2 * macs * self.run.workload.train_count,
                full_macs=network.macs(times.everything),
                predicted_peak_bytes=max(peaks),
                analytic_peak_bytes=self.costs.analytic_bytes(mask),
                selection_seconds=time.perf_counter() - started,
                importance=scores,
                profiled=profiled,
            )
        )
        self.run.add_overhead("selection", time.perf_counter() - started)
        self.run.emit(TensorsSelected(len(self.intervals) - 1, self.intervals[-1], len(network.names)))
        self.run.position.notes[_INTERVALS] = to_data(self.intervals)
        self.run.save(self.trainer.state())

    def _prune(self) -> float:
        """Remove channels that ``prunetrain`` has driven to zero; return the share of remaining operations."""
        if self.pruner is None:
            return 1.0
        removed = self.pruner.prune()
        if removed:
            self.run.position.kept = None  # the scheme is for the smaller network
            self.run.emit(Notice(f"prunetrain removed {removed:,} parameters"))
        return self.pruner.macs() / sum(unit.macs for unit in self.run.profile.units)

    def _importance(self) -> dict[str, float]:
        scores = rank_tensors(self.strategy, self.chain, self.trainer, self.data, self.run)
        wrong = next((name for name, value in scores.items() if not np.isfinite(value)), None)
        if wrong is not None:
            raise DivergedError(
                f"the update of {wrong} made the loss {scores[wrong]} at epoch {self.run.position.epoch + 1}. "
                "Lower --lr in a new run, or check the data for broken images; what was saved is untouched."
            )
        return scores

    def _choose(self, scores: Mapping[str, float]) -> Mask:
        """Apply the selection and test it in a dry run; choose a smaller one if it runs out of memory."""
        strategy, network = self.strategy, self.costs.memory
        if not strategy.selects:
            mask = strategy.fixed(network)
            self._apply(mask)
            if self._dry_run_fits():
                return mask
            raise self._refused()
        values = np.array([scores[name] for name in network.names])
        headroom = self.costs.headroom(strategy.budget, strategy.time_ratio or 1.0)
        while True:
            found = choose(self.costs.times, network, values, headroom)
            mask = self._or_previous(found, values)
            self._apply(mask)
            if self._dry_run_fits():
                return mask
            if headroom.bytes is None or mask is not found:
                raise self._refused()
            self.run.emit(
                Notice(f"interval {len(self.intervals) + 1}: a selection ran out of memory; taking a smaller one")
            )
            taken, least = (needed_bytes(network, each, headroom) for each in (mask, network.head))
            headroom = replace(headroom, bytes=least + int((min(headroom.bytes, taken) - least) * _SHRINK))

    def _or_previous(self, mask: Mask, values: np.ndarray) -> Mask:
        """The selection, or the previous one, if any, if no update lowers the loss."""
        network = self.costs.memory
        if (mask & ~network.head).any():
            return mask
        if self.intervals:
            self.run.emit(Notice("no update lowers the loss within the budget; keeping the selection as it is"))
            return network.mask(self.intervals[-1].tensors)
        raise nothing_selected(self.costs, self.strategy.budget, values)

    def _apply(self, mask: Mask) -> None:
        names = self.costs.memory.selected(mask)
        if set(names) != set(self.trainer.selected):
            self.trainer.select(names)
            release_memory()

    def _dry_run_fits(self) -> bool:
        """Run a dry step on a synthetic batch; return whether it fits together with the future optimizer state."""
        run, costs, state = self.run, self.costs, self.trainer.optimizers.state()
        held = sum(t.numel() * t.element_size() for t in state.values() if t.dim())
        mask = costs.memory.mask(self.trainer.selected)
        coming = max(costs.memory.state_bytes(mask) - held, 0)
        try:
            with run.limit.reserve(SPARE_BYTES + coming):
                peak = self._dry_peak(state)
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            peak = None
        release_memory()
        run.tick()
        if peak is None:
            return False
        run.position.phase_tensor_bytes = max(run.position.phase_tensor_bytes, peak + coming)
        return True

    def _dry_peak(self, state: Mapping[str, Tensor]) -> int:
        """Run a step twice, first to generate kernels; return the peak of live tensors, with ``state`` (any shapes)."""
        run, shape, size = self.run, self.chain.input_shape, self.strategy.micro_batch
        inputs, labels = random_batch(shape, run.workload.classes, size, str(run.device))
        with run.limit.allow_kernels():
            self.trainer.dry_step(inputs, labels)
        tracked: list[nn.Module | Tensor] = [self.trainer.module, *state.values(), inputs, labels]
        return tensor_peak_bytes(lambda: self.trainer.dry_step(inputs, labels), tracked)

    def _refused(self) -> BudgetExceededError:
        return BudgetExceededError(
            f"a step of --scheme {self.strategy.scheme} needs more than the memory budget of {self.run.budget}, "
            f"although it was predicted to fit. Use a larger {self.run.budget.memory_flag}."
        )

    def _end_epoch(self, phase: Phase) -> float | None:
        """Store the median step time before the checkpoint at the epoch's end, and validate."""
        run, present = self.run, self.intervals[-1]
        seconds = self.trainer.step_seconds
        present = replace(
            present,
            epochs=run.position.epoch + 1 - present.first_epoch,
            measured_seconds=float(np.median(seconds)) if seconds else present.measured_seconds,
        )
        may_drift = self.strategy.selects and not present.profiled and looks_drifted(present)
        found = may_drift and drifted(self.trainer, self.costs, run, self.chain.input_shape)
        self.intervals[-1] = replace(present, drifted=found)
        run.position.notes[_INTERVALS] = to_data(self.intervals)
        if len(self.data.val) == 0:
            return None
        return validate(self.trainer.module.eval(), self.data, run, phase)

    def _profile_again(self) -> bool:
        """Measure the operators again (ElasticTrainer section 5.4), once; a checkpoint stores the result."""
        notes = self.run.position.notes
        if notes.get(_MEASURED) == len(self.intervals):
            return True
        parameters = self.trainer.parameters.values()
        tensors = profile_again(self.strategy, self.chain, self.costs, self.run, parameters)
        if tensors is None:
            return False
        self._use(tensors)
        notes[_PROFILE], notes[_MEASURED] = to_data(tensors), len(self.intervals)
        self.run.save(self.trainer.state())
        return True
