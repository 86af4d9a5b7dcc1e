"""Shared code of strategies that keep the whole network in memory; most train it by its own loss."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from snugfit._chain import Chain, Unit, distinct_state, layers_called_once, load_into, on_meta_or, release
from snugfit._core.budget import Budget
from snugfit._core.hardware import Hardware
from snugfit._core.parts import largest_parts
from snugfit._core.plan import FEWEST_NORM_IMAGES, Cost, Phase, Shortfall
from snugfit._core.profile import HeapUse, ProbeLine, Profile, UnitStats
from snugfit._core.record import Record
from snugfit._core.workload import Workload
from snugfit._storage.tensor_file import Deferred, save_model
from snugfit._training.dry_run import dry_run_phase, smaller_batch_sizes
from snugfit._training.ema import first_step_notice
from snugfit._training.events import Notice
from snugfit._training.finalize import Outcome, evaluate_model, make_record, score_within
from snugfit._training.loop import train_phase
from snugfit._training.network import Forward, NetworkTrainer
from snugfit._training.own_metrics import reset, values_of
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit._training.task import task_of
from snugfit._upstream import to_channels_last
from snugfit.lean.bfloat16_weights import store_bfloat16
from snugfit.memory import release_memory, trim_heap
from snugfit.profiling import Probe, smallest_floor, unit_stats
from snugfit.strategies.memory_estimates import (
    PASS_SHARE,
    TENSOR_TO_PROCESS,
    available_headroom,
    evaluation_bytes,
    forward_images,
    heap_hole_bytes,
    passing_kernel_bytes,
    place_synthetic_weights,
    require_images,
    reserved_bytes,
    safety,
    smallest_budget,
    step_headroom,
    synthetic_batch,
    weight_layers,
    with_safety,
)
from snugfit.strategies.micro_batch import MicroBatching, choose_batch, hold_modes, line_name, probe_of_line, step_lines
from snugfit.strategies.step_floor import network_floor, run_step

MakeForward = Callable[[Chain], Forward]
MakeTrainer = Callable[[Chain, nn.Module, Workload, int], NetworkTrainer]
"""Makes a trainer from a chain, its units as one module, the workload, and the micro-batches of a step."""

LONGEST_STEP_SECONDS = 4.0
"""No longer step of a whole network is run to refine its line. There are few such lines, and training takes many steps;
between or beyond measured batches a line was up to 12 % too high."""

PLAIN_PROBE = "network"
"""Name of the probe of the network's step without recomputation; several strategies share it."""
WHOLE_BATCH_SHARE = 0.9
"""Share of the headroom in which a whole batch fits for sure, whatever later measurements leave in memory."""


def by_own_loss(make_forward: MakeForward) -> MakeTrainer:
    """Make trainers with the network's own loss and the forward pass that ``make_forward`` builds from the chain."""

    def make(chain: Chain, module: nn.Module, workload: Workload, micro_batches: int) -> NetworkTrainer:
        forward = make_forward(chain)
        trainer = NetworkTrainer(module, forward, workload, micro_batches, chain.loss, chain.optimizer)
        for unit in () if chain.undivided else chain.all_units:
            trainer.optimizers.apply_in_parts(layers_called_once(unit.module))
        return trainer

    return make


def in_weight_dtype(chain: Chain, workload: Workload) -> Chain:
    """The chain on the meta device, or a copy of it whose weights have the workload's ``weight_dtype``."""
    if workload.weight_dtype == "float32":
        return chain
    chain = copy.deepcopy(chain)
    for unit in chain.all_units:
        store_bfloat16(unit.module)
    return chain


def reasons_against_training(chain: Chain) -> list[str]:
    """Why nothing can be trained by the network's own loss."""
    parameters = (each for unit in chain.all_units for each in unit.module.parameters())
    return [] if any(each.requires_grad for each in parameters) else ["no parameter requires a gradient"]


def reasons_against_rounding(workload: Workload, chain: Chain) -> list[str]:
    """Why the weights of a network that cannot be divided cannot be stored in fewer bits, if that is asked for."""
    if not chain.undivided or workload.weight_dtype == "float32":
        return []
    flag = f"--weight-dtype {workload.weight_dtype}"
    return [f"{flag} rounds weights that layers alone read, which is unknown: {chain.undivided}"]


def network_probe(
    name: str,
    chain: Chain,
    workload: Workload,
    device: str,
    make_trainer: MakeTrainer,
    *,
    hold: bool,
    heap: HeapUse = "layers",
) -> Probe:
    """The probe of one training step of the whole network; its key is :func:`line_name` of ``name``.

    The chain is one of :func:`in_weight_dtype`. With ``hold`` gradients are held, and applied after a second
    micro-batch; otherwise the backward pass applies them. ``heap`` is how much freed memory training keeps.
    """

    def batch_of(batch: int, where: str) -> tuple[Tensor, Tensor]:
        return synthetic_batch(task_of(workload), chain.input_shape, batch, where)

    def make(where: str) -> NetworkTrainer:
        clone = copy.deepcopy(chain)
        module = clone.to_module()
        place_synthetic_weights(module, where)
        return _stepping(make_trainer(clone, module, workload, 2 if hold else 1))

    def build() -> Callable[[int], object]:
        trainer = make(device)
        return lambda batch: run_step(trainer, lambda: batch_of(batch, device), hold=hold)

    @cache
    def floor(batch: int) -> int:
        trainer = make("meta")
        trainer.train_mode()
        require_images(batch, limit, trainer.module)
        weights = sum(unit.weight_bytes for unit in chain.all_units)  # stored weights may be smaller than loaded ones
        least = weights + int(4 * trained * workload.optimizer.state_per_parameter)

        def count() -> int:
            return max(network_floor(trainer, lambda: batch_of(batch, "meta"), hold=hold), weights)

        return on_meta_or(count, least, whole=bool(chain.undivided))

    limit = workload.effective_batch
    parameters = [each for unit in chain.all_units for each in unit.module.parameters()]
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    held = sum(unit.parameters for unit in chain.all_units)
    return Probe(
        line_name(name, hold=hold),
        build,
        floor,
        limit,
        sizes=largest_parts(limit) if hold else (),
        layers=weight_layers(chain),
        kernels=name,
        shared=name == PLAIN_PROBE,
        longest_seconds=LONGEST_STEP_SECONDS,
        heap=heap,
        headroom=partial(_expected_headroom, workload, held, heap_hole_bytes(workload, len(parameters))),
    )


def may_not_fit(probe: str, batch: int, tried: Mapping[str, ProbeLine | None], available: float) -> bool:
    """Whether a whole batch may not fit a probe's step, so that smaller parts of it must be measured, too."""
    line = tried.get(probe)
    return line is None or line.largest_batch(WHOLE_BATCH_SHARE * available_headroom(available), batch) < batch


def _is_no_micro_batch(
    floor: Callable[[int], int], held: Probe, batch: int, tried: Mapping[str, ProbeLine | None], available: float
) -> bool:
    """Whether the whole batch may fit, by the tensors of its step, or micro-batches with held gradients may not fit."""
    room = WHOLE_BATCH_SHARE * available_headroom(available)
    if held.name not in tried:
        return floor(batch) <= available or smallest_floor(held.floor)[1] * TENSOR_TO_PROCESS > room
    line = tried[held.name]
    return line is None or not line.largest_batch(room, batch)


def _expected_headroom(workload: Workload, parameters: int, holes: int, available: float, shape_bytes: float) -> float:
    """Bytes for the kernels and tensors of a step in training, of those available when its probe is measured.

    Every new batch size leaves ``shape_bytes``. A step has micro-batches of up to two sizes.
    """
    state = 4 * parameters * workload.optimizer.state_per_parameter
    passing = _most_passing_bytes(workload, shape_bytes)
    resting = passing + evaluation_bytes(workload) + holes
    return available_headroom(available, reserved_bytes(state, passing)) - resting - 2 * shape_bytes


def _most_passing_bytes(workload: Workload, shape_bytes: float) -> float:
    """Most bytes of :func:`passing_kernel_bytes`, whatever the batch."""
    return 2 * PASS_SHARE * shape_bytes * (workload.epochs > 1)


def batch_settings(
    workload: Workload,
    profile: Profile,
    budget: Budget,
    probe: str,
    *,
    accumulate: bool,
    recomputes: bool = False,
    holds: bool = True,
) -> MicroBatching | None:
    """The batch size within a budget; see :func:`snugfit.strategies.micro_batch.choose_batch`.

    The first step of a dry run begins without optimizer state, which leaves room for what the dry run reserves. Plain
    backpropagation has its peak where the backward pass begins, before most of the state exists. If feature maps are
    compressed or computed again, the peak comes with the largest ones, where the backward pass ends; gradients that
    are applied at once have made most of the state by then, and the dry run has the safety's share of the budget. If
    they are clipped, they are held, and there is no state before the first step ends. ``holds`` is whether
    micro-batches hold gradients; those of a whole batch in tiles are applied at once, and computed again.
    """
    weights = 4 * sum(unit.trained for unit in profile.units)
    lines = step_lines(profile.lines, probe)
    steps = [lines[name] for name in (probe, line_name(probe, hold=True)) if name in lines]
    passing = _most_passing_bytes(workload, max((line.shape_bytes for line in steps), default=0.0))
    state = weights * workload.optimizer.state_per_parameter
    late = min(state, safety().share * (budget.memory_bytes or 0))
    absent = (state if holds else 0.0, late if recomputes or workload.compresses else state)
    if workload.holds_gradients:
        absent = (state, state)
    base = profile.base_bytes + _beside_steps(workload, profile)
    held, whole = (step_headroom(budget, base, reserved_bytes(each, passing)) for each in absent)
    norms = not profile.units or any(unit.tracks for unit in profile.units)
    fewest = (FEWEST_NORM_IMAGES if norms else 1) if holds else None
    return choose_batch(lines, probe, held, workload, accumulate=accumulate, whole=whole, fewest=fewest)


def network_cost(profile: Profile, probe: str, workload: Workload, micro: MicroBatching) -> Cost:
    """Cost of training the whole network at a (micro-)batch."""
    line = step_lines(profile.lines, probe)[micro.line(probe)]
    passed = forward_images(workload, tracks=any(unit.tracks for unit in profile.units))
    epoch = micro.epoch_seconds(line, workload, passed)
    passing = passing_kernel_bytes(workload, micro.micro_batch, line.shape_bytes)
    resting = profile.base_bytes + passing + _beside_steps(workload, profile)
    peak = with_safety(resting, micro.step_bytes(line, workload))
    units = tuple(unit.name for unit in profile.units)
    phase = Phase("network", peak, epoch * workload.epochs, micro.micro_batch, units)
    return Cost(peak, epoch, epoch * workload.epochs, phases=(phase,))


def _beside_steps(workload: Workload, profile: Profile) -> int:
    """Bytes that training takes and that measuring single steps does not show."""
    holes = heap_hole_bytes(workload, sum(unit.tensors for unit in profile.units))
    return evaluation_bytes(workload) + holes


def network_shortfall(profile: Profile, floor_bytes: int, budget: Budget, workload: Workload) -> Shortfall:
    """Why a network does not fit even at one sample, whose floor this is, and the smallest budget that suffices."""
    needed = smallest_budget(profile, floor_bytes + _beside_steps(workload, profile))
    smallest = max(needed, (budget.memory_bytes or 0) + 1_000_000)
    return Shortfall((f"one sample needs {smallest / 1e6:.0f} MB",), smallest)


def least_floor(profile: Profile, *probes: str) -> int:
    """The fewest tensor bytes of the steps of these probes, with gradients held or not."""
    names = [line_name(probe, hold=hold) for probe in probes for hold in (False, True)]
    return min(profile.floors[name] for name in names if name in profile.floors)


def fit_network(
    strategy: MicroBatching,
    chain: Chain,
    data: TrainingData,
    run: Run,
    make_trainer: MakeTrainer,
    *,
    whole: bool = False,
) -> Record:
    """Train, evaluate and save the whole network with a strategy's settings; return the record.

    With ``whole`` trainers take all images of a step at once, and divide them into micro-batches themselves.
    """
    chain = in_weight_dtype(chain, run.workload)

    def load(parts: int) -> NetworkTrainer:
        own = copy.deepcopy(chain) if chain.undivided else chain  # a forward pass may change what is no tensor
        return make_trainer(own, load_network(own, run), run.workload, parts)

    accumulates = whole or strategy.holds_gradients or _may_accumulate(run, run.predicted.phases[0].batch_size)
    trained = train_network(load, data, run, micro_batches=strategy.micro_batches, accumulates=accumulates, whole=whole)
    module, phase = trained.trainer.module, trained.phase
    save_model(run.folder, _float_state(module), run.manifest)
    evaluation = evaluate_model(trained.trainer.evaluating(), data, run, phase.batch_size)
    run.end_phase(phase, run.position.epoch, trained.steps)
    parameters = {"full": chain.parameters, "trained_model": chain.parameters}
    settings = {**asdict(strategy), **asdict(trained.settings)}
    scale = trained.trainer.loss_scale
    scaling = None if scale is None else {"scale": scale.value, "skipped_steps": scale.skipped}
    return make_record(run, data, Outcome(strategy.name, settings, evaluation, parameters, loss_scale=scaling))


@dataclass(frozen=True)
class Trained:
    """A network after its last step, without optimizer state.

    The phase has the batch size that it ran at; ``steps`` are those of an epoch, ``settings`` the micro-batches.
    """

    trainer: NetworkTrainer
    phase: Phase
    steps: int
    settings: MicroBatching


def train_network(
    load: Callable[[int], NetworkTrainer],
    data: TrainingData,
    run: Run,
    *,
    micro_batches: int,
    accumulates: bool,
    whole: bool = False,
) -> Trained:
    """Run a dry run and train a network in the run's current phase. The caller ends the phase.

    ``load`` makes the trainer for a number of micro-batches, with the initial weights. A batch that does not fit is
    accumulated in smaller parts if ``accumulates``, and made smaller otherwise. With ``whole`` a trainer takes all
    parts at once.
    """
    index, workload = run.position.phase, run.workload
    phase = run.predicted.phases[index]
    batch_size = workload.step_images(phase.batch_size, micro_batches)

    def parts(size: int) -> int:
        return -(-batch_size // size) if accumulates else 1

    def images(size: int) -> int:
        return batch_size if whole else size

    phase = dry_run_phase(
        phase,
        _fallbacks(run.profile, phase.batch_size, batch_size, accumulates=accumulates),
        lambda size: _stepping(load(parts(size))),
        lambda size: synthetic_batch(task_of(workload), workload.input_shape, images(size), str(run.device)),
        run,
    )
    micro_batches = parts(phase.batch_size)
    trainer = load(micro_batches)
    if run.resumed:
        trainer.load_state(run.resumed_tensors)
    steps = data.train.steps(workload.step_images(phase.batch_size, micro_batches))
    run.start_phase(phase, index, len(run.predicted.phases), workload.epochs, steps)
    if notice := first_step_notice(workload.optimizer, steps * workload.epochs):
        run.emit(Notice(notice))
    evaluate = (lambda: validate(trainer.evaluating(), data, run, phase)) if len(data.val) else None
    train_phase(trainer, data.train, replace(phase, batch_size=images(phase.batch_size)), run, evaluate)
    trainer.optimizers.release()
    settings = MicroBatching(phase.batch_size, micro_batches, accumulate=micro_batches > 1)
    return Trained(trainer, phase, steps, settings)


def _stepping(trainer: NetworkTrainer) -> NetworkTrainer:
    """A trainer for synthetic batches, whose first step makes the optimizer state even if its gradients overflow."""
    if trainer.loss_scale is not None:
        trainer.loss_scale.skips = False
    return trainer


def _may_accumulate(run: Run, batch: int) -> bool:
    """Whether the effective batch may be split: if the user allows accumulation, its step was measured."""
    return batch == run.workload.effective_batch and any(name != probe_of_line(name) for name in run.profile.lines)


def _fallbacks(profile: Profile, size: int, batch_size: int, *, accumulates: bool) -> list[int]:
    """Batch sizes to try after ``size`` ran out of memory; with accumulation, those of parts of the whole batch."""
    smallest = min((line.smallest_batch for line in profile.lines.values()), default=1)
    sizes = smaller_batch_sizes(size, smallest)
    if not accumulates:
        return sizes
    parts = dict.fromkeys(-(-batch_size // each) for each in sizes)
    return [-(-batch_size // each) for each in parts if batch_size // each >= smallest]


def load_network(chain: Chain, run: Run) -> nn.Module:
    """The run's stored weights as one module, on the run's device, in the chain's types."""
    for index, unit in enumerate(chain.all_units):
        release(unit)
        load_into(unit, _stored_weights(unit, index, run))
    module = chain.to_module()
    to_channels_last(module, run.device)
    trim_heap()  # weights as they were read, 1 MB of MobileNetV2
    return module


def _stored_weights(unit: Unit, index: int, run: Run) -> dict[str, Tensor]:
    """A unit's weights, in their shapes; those that are kept in a smaller type are converted from the mapped file."""
    if run.workload.weight_dtype == "float32":
        return run.weights.load(index)
    own = unit.module.state_dict()
    return {name: tensor.to(own[name].dtype, copy=True) for name, tensor in run.weights.map(index).items()}


def _float_state(module: nn.Module) -> dict[str, Tensor | Deferred]:
    """The state dict, in its shapes, each tensor once; weights in bfloat16 are converted when they are written."""
    tensors = distinct_state(module)
    state: dict[str, Tensor | Deferred] = {**tensors}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            state[name] = Deferred(torch.empty_like(tensor, dtype=torch.float32, device="meta"), tensor.float)
    return state


def validate(forward: Forward, data: TrainingData, run: Run, phase: Phase) -> float:
    """The score of a forward pass in evaluation mode on the validation data, at a phase's batch size.

    ``run.own_values`` gets those of metrics from Python.
    """
    own = run.own.metrics
    found = score_within(forward, data.val, run, phase.batch_size).value
    run.own_values = values_of(own)
    if own:
        reset(own)  # what they keep is memory
        release_memory()
    return found


@dataclass(frozen=True)
class FullNetwork(MicroBatching, ABC):
    """A strategy that keeps the whole network in memory; subclasses differ in their trainers."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    probe: ClassVar[str]
    """Key of its line in a profile."""

    @abstractmethod
    def make_trainer(self, units: Sequence[UnitStats]) -> MakeTrainer:
        """What makes the trainer of a chain with these units."""

    def validate(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[str]:
        """Reasons why it cannot serve this model: nothing trains, or it has no units."""
        return reasons_against_training(chain) or (chain.reasons_against_units() if chain.undivided else [])

    def probes(self, workload: Workload, chain: Chain, hardware: Hardware) -> list[Probe]:
        """The whole network's step, with gradients applied at once, and with gradients held if a batch may not fit."""
        make_trainer, chain = self.make_trainer(unit_stats(chain)), in_weight_dtype(chain, workload)
        batch = workload.effective_batch
        plain, *held = (
            network_probe(self.probe, chain, workload, hardware.device, make_trainer, hold=hold)
            for hold in hold_modes(self.accumulate)
        )
        if held:
            plain = replace(plain, needed=partial(_is_no_micro_batch, plain.floor, held[0], batch))
        return [plain, *(replace(each, needed=partial(may_not_fit, self.probe, batch)) for each in held)]

    def propose(
        self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget
    ) -> Iterator[FullNetwork]:
        """The whole batch, else accumulation to it, else the largest batch that fits without accumulation."""
        micro = batch_settings(workload, profile, budget, self.probe, accumulate=self.accumulate)
        if micro is not None:
            yield replace(self, **asdict(micro))

    def estimate(self, workload: Workload, profile: Profile, hardware: Hardware) -> Cost:
        """Cost from the measured lines."""
        return network_cost(profile, self.probe, workload, self)

    def shortfall(self, workload: Workload, profile: Profile, hardware: Hardware, budget: Budget) -> Shortfall:
        """Why nothing was proposed, and the smallest memory budget that would do."""
        return network_shortfall(profile, least_floor(profile, self.probe), budget, workload)

    def trainers_of(self, run: Run) -> MakeTrainer:
        """What makes the trainers of a run."""
        return self.make_trainer(run.profile.units)

    @property
    def takes_whole_batches(self) -> bool:
        """Whether trainers take all images of a step at once, and divide them into micro-batches themselves."""
        return False

    def fit(self, chain: Chain, data: TrainingData, run: Run) -> Record:
        """Train."""
        return fit_network(self, chain, data, run, self.trainers_of(run), whole=self.takes_whole_batches)
