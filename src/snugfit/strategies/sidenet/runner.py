"""The run of ``sidenet``: prune and retrain if planned, then fine-tune."""

from __future__ import annotations

import copy
from dataclasses import asdict

from snugfit._chain import Chain
from snugfit._core.record import Record
from snugfit._storage.weights_file import save_model
from snugfit._training.finalize import Outcome, evaluate_model, make_record
from snugfit._training.network import NetworkTrainer
from snugfit._training.run import Run
from snugfit._training.strategy import TrainingData
from snugfit.lean import FloatState
from snugfit.strategies.full_network import load_network, train_network
from snugfit.strategies.sidenet.configurations import SidenetSettings
from snugfit.strategies.sidenet.frozen import FrozenNetwork
from snugfit.strategies.sidenet.network import make_trainer, restore_layers
from snugfit.strategies.sidenet.retraining import Retraining, load_pruned, prune_and_retrain


def fit_sidenet(strategy: SidenetSettings, chain: Chain, data: TrainingData, run: Run) -> Record:
    """Train, evaluate, save, and return the record."""
    chain, configuration = copy.deepcopy(chain), strategy.configuration
    frozen = FrozenNetwork(copy.deepcopy(chain), strategy.scheme, configuration.side_width, strategy.prune)
    if configuration.pruned and run.position.phase == 0:
        retraining = Retraining(frozen, strategy.prune_importance, strategy.retrain_epochs)
        prune_and_retrain(retraining, copy.deepcopy(chain), data, run)
    make = make_trainer(configuration, frozen, strategy.side_lr, lambda module: load_pruned(module, run))

    def load(micro_batches: int) -> NetworkTrainer:
        fresh = copy.deepcopy(chain)  # its parameters are frozen below, and its layers may shrink
        return make(fresh, load_network(fresh, run), run.workload, micro_batches)

    trained = train_network(load, data, run, micro_batches=strategy.micro_batches, accumulates=strategy.holds_gradients)
    module, phase = trained.trainer.module, trained.phase
    evaluation = evaluate_model(module.eval(), data, run, phase.batch_size)
    state = FloatState(restore_layers(module))
    save_model(run.folder, state, run.manifest)
    run.end_phase(phase, run.workload.epochs, trained.steps)
    buffers = {name for name, _ in module.named_buffers()}
    kept = sum(tensor.numel() for name, tensor in state.items() if name not in buffers)
    settings = {
        **asdict(strategy),
        **asdict(trained.settings),
        "widths": frozen.width_changes if configuration.pruned else {},
    }
    parameters = {"full": chain.parameters, "trained_model": kept}
    return make_record(run, data, Outcome(strategy.name, settings, evaluation, parameters))
