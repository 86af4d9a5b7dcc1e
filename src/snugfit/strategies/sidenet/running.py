"""The run of ``sidenet``: fine-tune what was added to a frozen network."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import TYPE_CHECKING

from snugfit.chain import Chain
from snugfit.core.record import Record
from snugfit.strategies.sidenet.network import make_trainer
from snugfit.strategies.whole import load_network, train_network
from snugfit.training.artifact import save_model
from snugfit.training.network import NetworkTrainer
from snugfit.training.outcome import evaluate_model, make_record
from snugfit.training.run import Run
from snugfit.training.split import TrainingData

if TYPE_CHECKING:
    from snugfit.strategies.sidenet.strategy import Sidenet


def fit_sidenet(strategy: Sidenet, chain: Chain, data: TrainingData, run: Run) -> Record:
    """Train, save, evaluate, and return the record."""
    chain = copy.deepcopy(chain)  # whose parameters will be frozen
    make = make_trainer(strategy.configuration, strategy.scheme, strategy.side_lr)

    def load(micro_batches: int) -> NetworkTrainer:
        return make(chain, load_network(chain, run), run.workload, micro_batches)

    trained = train_network(
        load, data, run, micro_batches=strategy.micro_batches, accumulates=strategy.micro_batches > 1
    )
    module, phase = trained.trainer.module, trained.phase
    save_model(run.folder, module.state_dict())
    evaluation = evaluate_model(module.eval(), data, run, phase.batch_size)
    run.end_phase(phase, run.workload.epochs, trained.steps)
    kept = sum(parameter.numel() for parameter in module.parameters())
    return make_record(
        run, strategy=strategy.name, settings={**asdict(strategy), **trained.settings}, evaluation=evaluation,
        parameters={"full": chain.parameters, "trained_model": kept}, data=data,
    )  # fmt: skip
