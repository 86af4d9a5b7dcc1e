"""Predicted peak bytes of a step against those of a real one, weights and optimizer state included."""

import functools

import numpy as np
import pytest
import torch
from small_networks import CLASSES, NETWORKS, SHAPE, profile_of, workload

from snugfit._chain import Chain
from snugfit._core.profile import OperatorStats, Saved, Scratch, TensorProfile, TensorStats
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.profiling import operator
from snugfit.selection.network import Network, step_bytes
from snugfit.strategies.elastic.trainer import TensorTrainer
from snugfit.strategies.memory_estimates import fill_synthetic_weights, random_batch

TOLERANCE = 0.10
"""How far a prediction may lie from what is measured."""
BATCH = 8


@functools.cache
def network(name, lean, batch=BATCH):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "REPEATS", 0)
        return Network(profile_of(NETWORKS[name](), lean=lean), batch)


@functools.cache
def trained(name, lean, micro_batches):
    torch.manual_seed(0)
    chain = Chain.from_module(NETWORKS[name](), SHAPE)
    module = chain.to_module()
    fill_synthetic_weights(module)
    return TensorTrainer(module, chain.forward, workload(), micro_batches, lean=lean)


def measured_bytes(name, names, lean, micro_batches=1, batch=BATCH):
    """Peak of a step, and the bytes of weights and state in it."""
    trainer = trained(name, lean, micro_batches)
    trainer.select(names)
    images, labels = random_batch(SHAPE, CLASSES, batch, "cpu")

    def step():
        for index in range(micro_batches):
            trainer.step(images, labels, 1 / micro_batches, update=index == micro_batches - 1)

    step()
    held = [*trainer.module.parameters(), *trainer.module.buffers(), *trainer.optimizers.state().values()]
    peak = tensor_peak_bytes(step, [*held, images, labels])
    return peak, sum(tensor.numel() * tensor.element_size() for tensor in held)


def selections(found):
    rng = np.random.default_rng(0)
    yield np.ones(len(found.names), dtype=bool)
    yield found.head
    for share in (0.1, 0.3, 0.6):
        yield (rng.random(len(found.names)) < share) | found.head


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("micro_batches", [1, 2], ids=["applied", "held"])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "stock"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_takes_what_was_predicted(name, lean, micro_batches, which):
    found = network(name, lean)
    mask = list(selections(found))[which]
    names = np.array(found.names)[mask]
    peak, resident = measured_bytes(name, names, lean, micro_batches)
    predicted = resident + step_bytes(found, mask, holds_gradients=micro_batches > 1)
    assert predicted == pytest.approx(peak, rel=TOLERANCE), (names, predicted / peak)


@pytest.mark.parametrize("name", ["vgg", "residual", "vit"])
def test_it_holds_at_another_batch_than_the_profiles(name):
    found = network(name, True, batch=24)
    for mask in list(selections(found))[:3]:
        peak, resident = measured_bytes(name, np.array(found.names)[mask], True, batch=24)
        assert resident + step_bytes(found, mask) == pytest.approx(peak, rel=TOLERANCE)


def test_optimizer_state_is_counted_once_for_each_selected_tensor():
    found = network("vgg", True)
    for mask in selections(found):
        _, resident = measured_bytes("vgg", np.array(found.names)[mask], True)
        weights = sum(4 * p.numel() for p in NETWORKS["vgg"]().parameters())
        assert found.state_bytes(mask) == resident - weights


def test_lean_selections_keep_less_than_stock_ones():
    for name in ("vgg", "residual", "mobilenet"):
        lean, stock = network(name, True), network(name, False)
        some = np.arange(len(lean.names)) % 6 == 3
        assert step_bytes(lean, some | lean.head) < step_bytes(stock, some | stock.head)


def tensor(name, size=0, saved=()):
    return TensorStats(name, size // 4, size, 0.0, 0.0, 0, saved)


def by_hand(*facts, given=4):
    return Network(TensorProfile(1, tuple(facts), input_bytes=given), 1)


def fact(index, inputs, map_, size, **more):
    return OperatorStats(str(index), "layer", inputs, map_, size, 0.0, 0.0, **more)


def test_by_hand_forward_alone():
    straight = by_hand(fact(0, (-1,), 1, 100), fact(1, (0,), 2, 10), fact(2, (1,), 3, 1))
    assert step_bytes(straight, np.zeros(0, dtype=bool)) == 4 + 100 + 10


def test_by_hand_what_is_kept_lives_until_the_gradient_has_passed():
    head = fact(2, (1,), 3, 1, tensors=(tensor("head", 8, (Saved(2, 10),)),))
    first = fact(0, (-1,), 1, 100, tensors=(tensor("first", 40, (Saved(0, 4),)),))
    net = by_hand(first, fact(1, (0,), 2, 10, saved=(Saved(1, 100),)), head)
    assert step_bytes(net, np.array([False, True])) == 4 + 100 + 10
    # backward of the middle: its kept input, the gradient that comes, and the one that goes; and the network's output
    assert step_bytes(net, np.array([True, True])) == 4 + 100 + 10 + 100 + 1


def test_by_hand_a_sum_hands_one_gradient_to_both_of_its_terms():
    def net(handed):
        branch = fact(1, (0,), 2, 100, tensors=(tensor("branch", 4),))
        first = fact(0, (-1,), 1, 100, tensors=(tensor("first", 4),))
        return by_hand(first, branch, fact(2, (0, 1), 3, 100, handed=handed))

    both = np.ones(2, dtype=bool)
    assert step_bytes(net((0, 1)), both) == 4 + 300 + 4, "branch: the output, the sum's gradient, the first's, a weight"
    assert step_bytes(net((0, 1)), both, holds_gradients=True) == 4 + 300 + 4 + 8
    assert step_bytes(net(()), both) == 4 + 400 + 4, "each term has a gradient of its own"


def test_by_hand_in_place_and_views_give_no_new_map():
    assert step_bytes(by_hand(fact(0, (-1,), 1, 100), fact(1, (0,), 1, 100)), np.zeros(0, dtype=bool)) == 104


def test_by_hand_scratch_and_the_input_of_a_unit():
    scratch = Scratch(alone=30, forward=7, backward=50)
    first = fact(0, (-1,), 1, 20, tensors=(tensor("first", 4),))
    net = by_hand(first, fact(1, (0,), 2, 20, scratch=scratch))
    assert step_bytes(net, np.array([False])) == 4 + 40 + 30
    assert step_bytes(net, np.array([True])) == 4 + 20 + 40 + 50, "the output and two gradients"
    parts = [fact(0, (-1,), 1, 20), fact(1, (0,), 2, 20), fact(2, (1,), 3, 20)]
    assert step_bytes(by_hand(*parts), np.zeros(0, dtype=bool)) == 4 + 40
    held = [parts[0], fact(1, (0,), 2, 20, entry=0), fact(2, (1,), 3, 20, entry=0)]
    assert step_bytes(by_hand(*held), np.zeros(0, dtype=bool)) == 4 + 60
