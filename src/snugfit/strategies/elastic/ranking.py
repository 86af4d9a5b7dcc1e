"""Importance of every tensor at the current weights of a run."""

from __future__ import annotations

from contextlib import ExitStack

from snugfit._chain import Chain
from snugfit._training.optimizers import lr_factor
from snugfit._training.run import Run
from snugfit._training.seeding import derive_seed, seed_all
from snugfit._training.strategy import TrainingData
from snugfit._training.task import precision_context
from snugfit.memory import release_memory
from snugfit.memory.scratch import ScratchFile, stored_bytes
from snugfit.selection.importance import importance, scratch_bytes
from snugfit.strategies.elastic.probes import trial_updates
from snugfit.strategies.elastic.settings import ElasticSettings
from snugfit.strategies.elastic.trainer import TensorTrainer


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
    factor = lr_factor(workload.optimizer.schedule, epoch / workload.epochs)
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
        stack.enter_context(precision_context(images.to(run.device), bfloat16=workload.precision == "bfloat16"))
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
