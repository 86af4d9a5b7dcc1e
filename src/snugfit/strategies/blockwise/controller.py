"""The Controller of NeuroFlux: runs the Worker on each block, manages caches, measures and chooses exits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from snugfit import _meta_device
from snugfit._chain import UnitStore, load_into, release
from snugfit._core.options import CacheDtype
from snugfit._core.own_cores import on_own_core
from snugfit._core.plan import Phase
from snugfit._core.record import ExitRecord, Record
from snugfit._storage.activation_cache import ActivationCache, CacheWriter
from snugfit._storage.tensor_file import save_model
from snugfit._training.batches import THREAD_BYTES, CachedBatches, RecomputedBatches
from snugfit._training.dry_run import dry_run_phase, smaller_batch_sizes
from snugfit._training.events import CacheProgress, ExitMeasured, Notice
from snugfit._training.finalize import Outcome, evaluate_model, make_record
from snugfit._training.loop import stop_if_requested, train_phase
from snugfit._training.run import Run
from snugfit._training.seeding import derive_seed, seed_all
from snugfit._training.strategy import BatchSource, TrainingData
from snugfit._upstream import to_channels_last
from snugfit.errors import CheckpointError
from snugfit.local import LocalLoss
from snugfit.local.assignment import HeadLoss, Layout
from snugfit.profiling import META_PASS_BYTES
from snugfit.strategies.blockwise.blocks import RECOMPUTED_CHUNK
from snugfit.strategies.blockwise.config import BlockwiseSettings
from snugfit.strategies.blockwise.exit_costs import bytes_of_test, exit_costs, in_memory
from snugfit.strategies.blockwise.partition import Block, choose_exit, saturated
from snugfit.strategies.blockwise.probes import module_probe_name
from snugfit.strategies.blockwise.worker import (
    BlockTrainer,
    LocalUnit,
    Recomputation,
    initialise_loss,
    loss_without_head,
)
from snugfit.strategies.memory_estimates import random_batch, safety, stored_batches
from snugfit.strategies.recomputation.schedule import Schedule


class BlockCaches:
    """The activation caches of a run, in a folder that contains nothing else: two per block, of at most two blocks."""

    def __init__(self, run: Run, dtype: CacheDtype) -> None:
        self.run, self.folder, self.dtype = run, run.cache_dir, dtype

    def open(self, block: int, split: str) -> ActivationCache:
        """Open the cache that a block has written for a split.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        cache = ActivationCache.open(self.folder, _name(block, split))
        if cache is None:
            raise CheckpointError(
                f"the activation cache of block {block + 1} ({split}) is missing from {self.folder}. "
                "Start the run again, and keep its cache folder."
            )
        return cache

    def writer(self, block: int, split: str, rows: int, row_shape: tuple[int, ...]) -> CacheWriter:
        """Create a cache of a block.

        Raises:
            OutOfStorageError: it exceeds the storage budget or the disk.
        """
        budget = self.run.budget.storage_bytes
        left = None if budget is None else max(budget - self._used_bytes(), 0)
        name, manifest = _name(block, split), self.run.manifest
        return CacheWriter(self.folder, name, rows, row_shape, dtype=self.dtype, storage_left=left, manifest=manifest)

    def keep_only(self, block: int | None) -> None:
        """Remove every file except the caches of one block: older caches, and leftovers of an interruption."""
        if not self.folder.is_dir():
            return
        kept = None if block is None else _name(block, "")
        files = [file for file in self.folder.iterdir() if kept is None or not file.name.startswith(kept)]
        self.run.manifest.remove(files)

    def _used_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir()) if self.folder.is_dir() else 0


def _name(block: int, split: str) -> str:
    return f"block{block}-{split}"


class Controller:
    """One blockwise run."""

    def __init__(self, strategy: BlockwiseSettings, layout: Layout, data: TrainingData, run: Run) -> None:
        self.strategy, self.layout, self.data, self.run = strategy, layout, data, run
        self.blocks = [Block(*block) for block in strategy.blocks]
        self.caches = BlockCaches(run, strategy.cache_dtype)
        self.residents: dict[int, LocalUnit] = {}
        self._stored: Tensor | None = None

    def fit(self) -> Record:
        """Train the remaining blocks, then choose, test and save the exit."""
        position = self.run.position
        try:
            while position.phase < len(self.blocks) and not position.notes.get("saturated"):
                self._run_block(position.phase)
            return self._finish()
        finally:
            self._release_all()

    def _run_block(self, index: int) -> None:
        run = self.run
        self.caches.keep_only(index - 1)
        block, phase = self._dry_run(index)
        steps, written = self._train_block(index, block, phase)
        if self.strategy.residency == "block" or self._ends_with(index):
            self._release_all()
        run.end_phase(phase, run.workload.epochs, steps, written)
        run.save({})
        self.caches.keep_only(index)
        stop_if_requested(run)

    def _train_block(self, index: int, block: Block, phase: Phase) -> tuple[int, int]:
        """Train a block, store it, and cache its outputs; return the steps of an epoch, and the bytes cached.

        Its trainer is freed before the phase ends: what it holds would count to the next one.
        """
        run, trainer = self.run, self._load_units(block)
        if run.resumed:
            trainer.load_state(run.resumed_tensors)
        with ExitStack() as opened:
            train, val = self._sources(index, opened)
            steps = train.steps(block.batch_size)
            run.start_phase(phase, index, len(self.blocks), run.workload.epochs, steps)
            train_phase(trainer, train, phase, run, passing_batch=self._forward_batch(block))
            trainer.release_optimizers()
            trainer.evaluate()
            self._store_units(block, trainer)
            return steps, self._pass_outputs(index, block, trainer, train, val)

    def _ends_with(self, index: int) -> bool:
        """Whether no block is trained after this one."""
        return index + 1 == len(self.blocks) or bool(self.run.position.notes.get("saturated"))

    def _dry_run(self, index: int) -> tuple[Block, Phase]:
        """The block and its phase at the batch size that fits in a dry run."""
        run, block, phase = self.run, self.blocks[index], self.run.predicted.phases[index]
        shape = self.layout.modules[block.first].input_shape
        phase = dry_run_phase(
            phase,
            smaller_batch_sizes(block.batch_size, self._smallest_batch(block)),
            lambda size: self._load_units(block, with_trunk=self.strategy.cache == "never"),
            lambda size: self._synthetic_batch(tuple(shape), size),
            run,
        )
        self._stored = None
        self._release_all()
        return replace(block, batch_size=phase.batch_size), phase

    def _smallest_batch(self, block: Block) -> int:
        """Smallest batch that every unit of a block can train on."""
        lines, names = self.run.profile.lines, list[str]()
        for index in block.units:
            units = [self.layout.chain.units[number].name for number in self.layout.units(index)]
            names.append(module_probe_name(units, self.strategy.modules[index][2]))
        return max((lines[name].smallest_batch for name in names if name in lines), default=1)

    @staticmethod
    def _forward_batch(block: Block) -> int:
        """Batch size of a forward pass without training.

        Such a pass may hold a unit's feature map three times: after its convolution, norm and activation. A training
        step may hold it once (:mod:`snugfit.lean`), and only the step was measured.
        """
        return max(min(2, block.batch_size), block.batch_size // 4)

    def _synthetic_batch(self, shape: tuple[int, ...], size: int) -> tuple[Tensor, Tensor]:
        """Inputs (B, *shape) and labels (B,); two batches of stored activations are kept too, as in real training."""
        self._stored = None
        self._stored = stored_batches(shape, size, self.strategy.cache_dtype)
        return random_batch(shape, self.run.workload.classes, size, str(self.run.device))

    def _load_units(self, block: Block, *, with_trunk: bool = False) -> BlockTrainer:
        """Load a block from disk, optionally with the units before it, and initialise its local losses."""
        if with_trunk and block.first > 0:
            self._load_trunk(self.layout.units(block.first)[0])
        if self.strategy.residency == "all" and not self.residents:
            self.residents = {index: self._load_unit(index) for index in range(len(self.layout))}
        return BlockTrainer([self.residents.get(index) or self._load_unit(index) for index in block.units])

    def _load_unit(self, index: int) -> LocalUnit:
        run, chain, numbers = self.run, self.layout.chain, self.layout.units(index)
        for number in numbers:
            load_into(chain.units[number], run.weights.load(number))
        module, loss = self.layout.modules[index].module, self.layout.make_loss(index)
        if isinstance(loss, HeadLoss):
            load_into(chain.head, run.weights.load(len(chain.units)))
        if (own := loss_without_head(loss)) is not None:
            initialise_loss(own, derive_seed(run.workload.seed, "exit", numbers[-1]))
        for each in (module, loss):
            to_channels_last(each, run.device)
        schedule, recomputation = self.strategy.modules[index][2], None
        if schedule:
            recomputation = Recomputation([chain.units[n].module for n in numbers], Schedule.parse(schedule))
        return LocalUnit(module, loss, run.workload, recomputation)

    def _store_units(self, block: Block, trainer: BlockTrainer) -> None:
        chain = self.layout.chain
        for index, local in zip(block.units, trainer.units, strict=True):
            numbers = self.layout.units(index)
            for number in numbers:
                self.run.weights.save(number, chain.units[number])
            if isinstance(local.loss, HeadLoss):
                self.run.weights.save(len(chain.units), {**local.loss.head.state_dict(), **chain.head.other_buffers})
            if (own := loss_without_head(local.loss)) is not None:
                self.run.exits.save(numbers[-1], own.state_dict())

    def _release_all(self) -> None:
        self.residents.clear()
        for unit in self.layout.chain.all_units:
            release(unit)

    def _sources(self, index: int, opened: ExitStack) -> tuple[BatchSource, BatchSource]:
        """Training and validation inputs of a block: the data set, or outputs of the previous block.

        Cached and recomputed outputs have the same values and the same order.
        """
        data = self.data
        if index == 0:
            return data.train, data.val
        if self.strategy.cache == "never":
            trunk, device = self._load_trunk(self.layout.units(self.blocks[index].first)[0]), self.run.device
            train, val = (RecomputedBatches(each, trunk, RECOMPUTED_CHUNK, device) for each in (data.train, data.val))
            return train, val
        sources = []
        with self.run.limit.allow_address_space(2 * THREAD_BYTES):
            for split, count in (("train", self.strategy.views), ("val", 1)):
                source = CachedBatches(self.caches.open(index - 1, split), seed=self.run.workload.seed, views=count)
                opened.callback(source.close)
                sources.append(source)
        return sources[0], sources[1]

    def _load_trunk(self, stop: int) -> Callable[[Tensor], Tensor]:
        """Load the trained units before ``stop`` in evaluation mode; return their forward pass on (B, C, H, W)."""
        trunk = nn.Sequential()
        for index, unit in enumerate(self.layout.chain.units[:stop]):
            if any(parameter.is_meta for parameter in unit.module.parameters()):
                load_into(unit, self.run.weights.load(index))
            to_channels_last(unit.module, self.run.device)
            trunk.append(unit.module.eval())

        def forward(images: Tensor) -> Tensor:
            with self.run.limit.allow_kernels(), on_own_core():
                activations: Tensor = trunk(images)
                return activations

        return forward

    def _pass_outputs(
        self, index: int, block: Block, trainer: BlockTrainer, train: BatchSource, val: BatchSource
    ) -> int:
        """Measure the exits of the block, then cache its outputs for the next block; return the bytes written."""
        run, shape = self.run, tuple(self.layout.modules[block.last].output_shape)
        last = index == len(self.blocks) - 1 or self.strategy.cache == "never"
        with ExitStack() as opened:
            started = time.perf_counter()
            writer = None if last else opened.enter_context(self.caches.writer(index, "val", len(val), shape))
            with run.freed.kept():
                self._measure_exits(block, trainer, val, writer)
            run.add_overhead("exit_selection", time.perf_counter() - started)
            ends = [self.layout.units(number)[-1] for number in block.units]
            if self.strategy.saturation_stop and saturated(run.position.exits, ends, len(self.data.val)):
                run.position.notes["saturated"] = True
                run.emit(
                    Notice(f"block {index + 1} no longer improves validation accuracy; deeper blocks are not trained")
                )
            if writer is None or run.position.notes.get("saturated"):
                return 0
            writer.close().close()
        started = time.perf_counter()
        rows = len(self.data.train) * self.strategy.views
        with self.caches.writer(index, "train", rows, shape) as train_writer:
            with run.freed.kept():
                self._write_train_cache(index, block, trainer, train, train_writer)
            train_writer.close().close()
        run.add_overhead("caching", time.perf_counter() - started)
        written = writer.bytes + train_writer.bytes
        stored = written + (run.position.phases[-1].cache_bytes if run.position.phases else 0)
        run.position.storage_bytes = max(run.position.storage_bytes, stored)
        return written

    @torch.no_grad()
    def _measure_exits(self, block: Block, trainer: BlockTrainer, val: BatchSource, writer: CacheWriter | None) -> None:
        correct = [0] * len(trainer.units)
        seed_all(derive_seed(self.run.workload.seed, "exits", block.first))
        for inputs, labels in val.in_order(self._forward_batch(block)):
            features = inputs.to(self.run.device)
            with self.run.limit.allow_kernels(), on_own_core():
                for offset, local in enumerate(trainer.units):
                    read = local.body(features)
                    correct[offset] += int((local.loss.predict(read).argmax(1).cpu() == labels).sum())
                    features = local.tail(read)
            if writer is not None:
                writer.write(features, labels)
            self.run.tick()
        phase = self.run.predicted.phases[self.run.position.phase].name
        for index, right in zip(block.units, correct, strict=True):
            last, accuracy = self.layout.units(index)[-1], right / max(len(val), 1)
            unit = self.layout.chain.units[last].name
            record = ExitRecord(unit, last, accuracy, self.layout.exit_parameters(index))
            self.run.position.exits.append(record)
            self.run.emit(ExitMeasured(phase, unit, last, accuracy, record.parameters))

    @torch.no_grad()
    def _write_train_cache(
        self, index: int, block: Block, trainer: BlockTrainer, train: BatchSource, writer: CacheWriter
    ) -> None:
        run, row_bytes = self.run, 0
        for inputs, labels in self._views(index, train, self._forward_batch(block)):
            features = inputs.to(run.device)
            with run.limit.allow_kernels(), on_own_core():
                for local in trainer.units:
                    features = local.unit(features)
            writer.write(features, labels)
            row_bytes += features.nbytes
            run.tick()
            run.emit(CacheProgress(run.predicted.phases[index].name, writer.written, writer.rows, row_bytes))
            stop_if_requested(run)

    def _views(self, index: int, train: BatchSource, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs (B, ...) and labels (B,) of all views, with the random transforms of an uninterrupted run."""
        views = range(self.strategy.views)
        for view in views if len(views) > 1 else (None,):  # a single view is not augmented
            seed_all(derive_seed(self.run.workload.seed, "cache", index, view or 0))
            yield from train.in_order(batch, view)

    def _finish(self) -> Record:
        """Choose, test and save the exit."""
        run, layout = self.run, self.layout
        chosen = choose_exit(run.position.exits, len(self.data.val), self.strategy.exit_tolerance)
        phase = self._test_of(chosen.index)
        run.start_phase(phase, len(self.blocks), len(self.blocks), 0, 0)
        model = self._load_exit(chosen.index)
        save_model(run.folder, model.state_dict(), run.manifest)
        evaluation = evaluate_model(model.eval(), self.data, run, phase.batch_size)
        run.end_phase(phase, 0, 0)
        self.caches.keep_only(None)
        parameters = {"full": layout.chain.parameters, "trained_model": chosen.parameters}
        taken = {"unit": chosen.unit, "index": chosen.index, "of": len(layout.chain.units)}
        settings = asdict(self.strategy)
        return make_record(run, self.data, Outcome(self.strategy.name, settings, evaluation, parameters, taken))

    def _test_of(self, index: int) -> Phase:
        """The final phase, predicted for the exit of a unit; the plan's prediction is for the one that needs most."""
        run, phase = self.run, self.run.predicted.phases[-1]
        self._release_all()
        layers = dict(self.strategy.exit_costs).get(self.strategy.local_loss)
        if layers is None:  # a plan of an earlier version
            return phase
        with run.limit.allow_address_space(META_PASS_BYTES):
            tested = exit_costs(self._exit_layout(), index)
            _meta_device.forget()
        most, needed = (
            bytes_of_test(in_memory(each, run.profile, run.device.type), phase.batch_size) for each in (layers, tested)
        )
        return replace(phase, peak_bytes=phase.peak_bytes - int((most - needed) * (1 + safety().share)))

    def _exit_layout(self) -> Layout:
        return Layout.of(self.layout.chain, self.layout.local_loss, self.layout.network.classes)

    def _load_exit(self, index: int) -> nn.Module:
        """Load the exit model of a unit; on the CPU its weights are mapped files, which the budget does not count."""
        run, chain = self.run, self.layout.chain
        layout = self._exit_layout()
        self._release_all()
        for position, unit in enumerate(chain.units[: index + 1]):
            load_into(unit, self._stored_state(run.weights, position, unit.module))
        loss: LocalLoss | None = None
        if layout.is_last(index):
            load_into(chain.head, self._stored_state(run.weights, len(chain.units), chain.head.module))
        else:
            loss = layout.make_loss(index).classifier()
            stored = self._stored_state(run.exits, index, loss)
            loss.load_state_dict({name: stored[name] for name in loss.state_dict()}, assign=True)
        first: nn.Module = chain.units[0].module
        to_channels_last(first)  # later feature maps follow the layout of the first
        return layout.exit_model(index, loss).to(run.device)

    def _stored_state(self, store: UnitStore, index: int, module: nn.Module) -> dict[str, Tensor]:
        """Weights, of any shapes, for forward passes; buffers, which a module may write, are in private memory."""
        if self.run.device.type != "cpu":
            return store.load(index)
        parameters = {name for name, _ in module.named_parameters()}
        return {name: t if name in parameters else t.clone() for name, t in store.map(index).items()}
