"""BatchNorm statistics for averaged weights, and checkpoints that hold those weights."""

import torch
from torch import nn
from training_samples import make_workload

from snugfit.core.workload import OptimizerSettings
from snugfit.training.averaging import REFRESH_BATCHES, refresh_norms
from snugfit.training.checkpoint import CheckpointStore
from snugfit.training.network import NetworkTrainer

SCHEDULEFREE = OptimizerSettings("schedulefree", lr=0.05, weight_decay=0.0, schedule="constant")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def batches(count, seed=1):
    torch.manual_seed(seed)
    return [(3 + torch.randn(8, 2, 4, 4), torch.randint(0, 3, (8,))) for _ in range(count)]


def trainer(module, settings=SCHEDULEFREE):
    return NetworkTrainer(module, module, make_workload(optimizer=settings))


def test_statistics_are_those_of_the_batches_by_hand():
    module, seen = network(), batches(3)
    refresh_norms(module, iter(seen), torch.device("cpu"))
    maps = [module[0](images) for images, _ in seen]
    means = torch.stack([each.mean((0, 2, 3)) for each in maps]).mean(0)
    torch.testing.assert_close(module[1].running_mean, means.detach())
    assert int(module[1].num_batches_tracked) == 3 and module[1].momentum == 0.1


def test_no_more_batches_are_read_than_needed():
    drawn = iter(batches(REFRESH_BATCHES + 5))
    refresh_norms(network(), drawn, torch.device("cpu"))
    assert len(list(drawn)) == 5


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
    torch.testing.assert_close(module[1].running_mean, torch.stack([m.mean((0, 2, 3)) for m in maps]).mean(0).detach())
    made.step(*batches(1)[0])
    assert not torch.equal(module[0].weight, averaged)


def test_settling_leaves_other_optimizers_alone():
    module = network()
    made = trainer(module, OptimizerSettings("sgd", lr=0.1))
    made.step(*batches(1)[0])
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    made.settle(batches(3))
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


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
