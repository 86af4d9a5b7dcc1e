"""Loops of one's own over networks that cannot be divided, some of whose modules are computed again."""

import sys

import pytest
import torch
from block_nets import NETWORKS, Tied, made_by
from torch.nn import functional as F

import snugfit
from snugfit._chain import Chain
from snugfit._core.workload import OptimizerSettings
from snugfit._engine.loop_trainer import LoopNetwork, parts_of
from snugfit.strategies.recomputation.schedule import parse_schedule


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_recomputation_gives_the_same_bits(make, sizes):
    found = []
    for text in ("0", "modules (blocks.0-1 blocks.2.drop)"):
        model = made_by(make)
        network = LoopNetwork(model, Chain.from_any_module(model, (1, 8, 8)), F.cross_entropy, OptimizerSettings("sgd"))
        trainer = network.trainer(parse_schedule(text), len(sizes) > 1)
        torch.manual_seed(1)
        for _ in range(3):
            trainer.step(parts_of(torch.randn(4, 1, 8, 8), torch.arange(4), sizes))
        found.append({**model.state_dict(), "random state": torch.get_rng_state()})
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_a_loop_leaves_the_network_as_it_was():
    model, example = made_by(Tied), (torch.randn(4, 1, 8, 8), torch.arange(4))
    before = set(vars(model.blocks[0]))
    with snugfit.fit(model, F.cross_entropy, memory="1GB", batch_size=4, example=example) as step:
        step(*example)
        assert step.record.recomputation == ""
    assert set(vars(model.blocks[0])) == before


def tied():
    """Images (B, 3, 128, 128) to logits (B, 10), in blocks of 5 MB of feature maps for each image."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [[nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Hardswish()] for _ in range(5)]
    blocks[1][0].weight = blocks[0][0].weight
    stem, head = nn.Conv2d(3, 16, 3, padding=1), [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(stem, *(nn.Sequential(*block) for block in blocks), *head)


def within_a_budget():
    import torch

    import snugfit

    snugfit.prepare_process(1)
    example, loss = (torch.randn(2, 3, 128, 128), torch.arange(2)), torch.nn.functional.cross_entropy
    with snugfit.fit(tied(), loss, example=example, memory="40MB", batch_size=2) as step:
        for _ in range(3):
            step(*example)
    return vars(step.record)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_measured_is_at_most_predicted_which_is_at_most_the_budget(fresh_process):
    record = fresh_process(within_a_budget, helpers=(tied,))["within_a_budget"]
    assert record["enforced"] and record["steps"] == 3
    assert 0 < record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"], record
    assert record["recomputation"].startswith("modules ("), "batch norms need two images, which do not fit without it"
