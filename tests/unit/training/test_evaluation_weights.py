"""Weights that are to be judged: statistics of their own, averages in place; and checkpoints that hold those."""

import pytest
import torch
from torch import nn
from training_samples import PHASE, OneWeight, Source, make_run, make_workload

from snugfit._core.workload import OptimizerSettings
from snugfit._storage.checkpoint import CheckpointStore
from snugfit._storage.manifest import Manifest
from snugfit._training.loop import train_phase
from snugfit._training.network import NetworkTrainer
from snugfit._training.statistics import images_for

SCHEDULEFREE = OptimizerSettings("schedulefree", lr=0.05, weight_decay=0.0, schedule="constant")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def batches(count, seed=1):
    torch.manual_seed(seed)
    return [(3 + torch.randn(8, 2, 4, 4), torch.randint(0, 3, (8,))) for _ in range(count)]


def trainer(module, settings=SCHEDULEFREE):
    return NetworkTrainer(module, module, make_workload(optimizer=settings))


def test_settled_weights_have_statistics_of_their_own_and_training_goes_on():
    module = network()
    made = trainer(module)
    for images, labels in batches(4):
        made.step(images, labels)
    trained = module[0].weight.detach().clone()
    made.settle(batches(6, seed=2))
    averaged = module[0].weight.detach().clone()
    assert not torch.equal(averaged, trained)
    maps = [module[0](images) for images, _ in batches(6, seed=2)]
    torch.testing.assert_close(module[1].running_mean, torch.cat(maps).mean((0, 2, 3)).detach())
    made.step(*batches(1)[0])
    assert not torch.equal(module[0].weight, averaged)


def test_trained_weights_have_statistics_of_their_own():
    module = network()
    made = trainer(module, OptimizerSettings("sgd", lr=0.1))
    made.step(*batches(1)[0])
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    made.settle(batches(3, seed=2))
    maps = torch.cat([module[0](images) for images, _ in batches(3, seed=2)]).detach()
    torch.testing.assert_close(module[1].running_mean, maps.mean((0, 2, 3)))
    torch.testing.assert_close(module[1].running_var, maps.transpose(0, 1).flatten(1).var(1))
    assert all(torch.equal(before[name], tensor) for name, tensor in module.named_parameters())


class Watching(OneWeight):
    """Notes what it is settled on, of a run, and of how many steps it was then."""

    def __init__(self, wants=True):
        super().__init__()
        self.wants, self.settled = wants, []

    def settle(self, batches):
        if self.wants:
            self.settled.append((len(self.calls), [inputs.flatten().tolist() for inputs, _ in batches]))


@pytest.mark.parametrize(("evaluate", "steps"), [(lambda: 0.5, [5, 10, 15]), (None, [15])])
def test_weights_are_settled_before_each_evaluation_and_at_the_end(tmp_path, evaluate, steps):
    trainable, run = Watching(), make_run(tmp_path)
    train_phase(trainable, Source(), PHASE, run, evaluate)
    assert [count for count, _ in trainable.settled] == steps
    assert run.position.overheads["statistics"] > 0


def test_statistics_are_of_the_epochs_own_images_at_the_batch_that_passes(tmp_path):
    trainable, run, source = Watching(), make_run(tmp_path, epochs=1), Source(600)
    train_phase(trainable, source, PHASE, run, passing_batch=7)
    order, (_, seen) = source.order(0), trainable.settled[0]
    assert seen == [[float(s) for s in order[7 * step : 7 * step + 7]] for step in range(images_for(600) // 7)]


def test_statistics_are_of_images_that_are_not_mixed(tmp_path):
    asked = []

    class Asked(Source):
        def epoch(self, *given, mixed=True, **options):
            asked.append(mixed)
            return super().epoch(*given, **options)

    train_phase(Watching(), Asked(), PHASE, make_run(tmp_path, epochs=1))
    assert asked == [True, False]


def test_what_needs_no_statistics_reads_no_batch_and_costs_nothing(tmp_path):
    trainable, run = Watching(wants=False), make_run(tmp_path)
    train_phase(trainable, Source(), PHASE, run)
    assert run.position.overheads == {}


@pytest.mark.parametrize(("count", "images"), [(3, 3), (256, 256), (600, 256), (50_000, 3000), (10**6, 4096)])
def test_statistics_are_of_a_share_of_the_images(count, images):
    assert images_for(count) == images


@pytest.mark.parametrize("when", [0, 1])
def test_a_run_killed_while_statistics_are_taken_goes_on_to_the_same_ones(tmp_path, when):
    """Killed in the first or the last epoch's pass: no checkpoint knows of it, so that it is made again."""

    def made():
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        return trainer(module, OptimizerSettings("sgd", lr=0.1))

    def end(folder, resume=False):
        run, one = make_run(folder, epochs=2), made()
        if resume:
            assert run.resume() or when == 0
            if run.resumed:
                one.load_state(run.resumed_tensors)
        train_phase(one, Source(), PHASE, run, lambda: None)
        return one.module.state_dict()

    whole, killed, retaken = end(tmp_path / "whole"), tmp_path / "killed", []
    with pytest.MonkeyPatch.context() as patched:
        original = NetworkTrainer.settle

        def settle(self, batches):
            batches = list(batches)
            retaken.append(len(batches))
            original(self, batches[:1] if len(retaken) > when else batches)
            if len(retaken) > when:
                raise KeyboardInterrupt

        patched.setattr(NetworkTrainer, "settle", settle)
        with pytest.raises(KeyboardInterrupt):
            end(killed)
    Manifest.of(killed)  # which a plan writes before a run
    again = end(killed, resume=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_a_checkpoint_holds_the_averaged_weights_and_the_trained_ones_beside(tmp_path):
    module = network()
    made = trainer(module)
    for images, labels in batches(4):
        made.step(images, labels)
    CheckpointStore(tmp_path).save(made.state(), {})
    live = {name: p.detach().clone() for name, p in module.named_parameters()}
    checkpoint = CheckpointStore(tmp_path).latest()
    taken_up = network()
    again = trainer(taken_up)
    again.load_state(checkpoint.load)
    assert all(torch.equal(p, live[name]) for name, p in taken_up.named_parameters())
    made.optimizers.average()
    stored = checkpoint.load("model")
    assert all(torch.equal(stored[name], p) for name, p in module.named_parameters())
