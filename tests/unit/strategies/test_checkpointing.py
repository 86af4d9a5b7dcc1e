"""The split into segments against all splits, and recomputation against the plain forward pass."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategy_samples import facts
from torch import nn

from snugfit.chain import Chain
from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.checkpoint import recomputing_forward, segment

unit_lists = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8).map(
    lambda sizes: [facts(f"u{i}", saved, output) for i, (saved, output) in enumerate(sizes)]
)


def cost(units, segments):
    kept = sum(units[indices[0] - 1].output_bytes for indices in segments[1:])
    return kept + max(sum(units[i].saved_bytes for i in indices) for indices in segments)


def all_splits(count):
    for mask in range(2 ** (count - 1)):
        cuts = [0, *[i for i in range(1, count) if mask >> (i - 1) & 1], count]
        yield [tuple(range(a, b)) for a, b in pairwise(cuts)]


@given(unit_lists)
def test_no_split_is_cheaper(units):
    found = segment(units)
    assert [i for indices in found for i in indices] == list(range(len(units)))
    assert all(indices for indices in found)
    assert cost(units, found) == min(cost(units, split) for split in all_splits(len(units)))


def test_equal_units_split_at_the_square_root():
    found = segment([facts(f"u{i}", 4, 4) for i in range(16)])
    assert cost([facts(f"u{i}", 4, 4) for i in range(16)], found) == 3 * 4 + 4 * 4
    assert len(found) == 4


def test_a_boundary_dearer_than_what_it_frees_is_not_cut():
    assert segment([facts("a", 10, 100), facts("b", 10, 100)]) == ((0, 1),)
    assert segment([facts("a", 100, 1), facts("b", 100, 1)]) == ((0,), (1,))


class Net(nn.Module):
    def __init__(self, dropout=0.0, momentum=0.1):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4, momentum=momentum),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
        )
        self.deep = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Dropout(dropout))
        self.plain = nn.BatchNorm2d(4, track_running_stats=False)
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x):
        return self.head(self.plain(self.deep(self.body(self.stem(x)))).flatten(1))


def pair(**options):
    """Two equal networks in float64, and a chain that shares the second one's weights."""
    torch.manual_seed(0)
    plain = Net(**options)
    other = copy.deepcopy(plain)
    chain = Chain.from_module(other, (2, 6, 6))
    return plain.double(), other.double(), chain


IMAGES = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 1, 0])


def train_once(module, forward):
    torch.manual_seed(7)
    module.train()
    loss = nn.functional.cross_entropy(forward(IMAGES), LABELS)
    loss.backward()
    return loss


splits = pytest.mark.parametrize("segments", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 1, 2, 3]]])


@splits
@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}, {"momentum": None}], ids=str)
def test_recomputation_changes_nothing(segments, options):
    plain, other, chain = pair(**options)
    assert len(chain.all_units) == 4
    for step in range(2):
        want = train_once(plain, plain)
        got = train_once(other, recomputing_forward(chain, segments))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
        for (name, mine), theirs in zip(other.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12, msg=name)
        for (name, mine), theirs in zip(other.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0, msg=name)
        assert other.stem[1].num_batches_tracked == step + 1
    assert other.stem[1].momentum == plain.stem[1].momentum


def test_evaluation_is_the_networks_own():
    plain, other, chain = pair(dropout=0.5)
    other.eval(), plain.eval()
    assert torch.equal(recomputing_forward(chain, [[0], [1], [2, 3]])(IMAGES), plain(IMAGES))
    before = copy.deepcopy(other.state_dict())
    with torch.no_grad():
        recomputing_forward(chain, [[0], [1], [2, 3]])(IMAGES)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_gradients_applied_in_the_backward_pass_are_the_same():
    """Weights of later segments have already changed when earlier ones are recomputed."""
    plain, other, chain = pair()

    def apply(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for module in (plain, other):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(apply)
    for _ in range(2):
        train_once(plain, plain)
        train_once(other, recomputing_forward(chain, [[0], [1], [2], [3]]))
    for mine, theirs in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_recomputation_saves_memory():
    network = nn.Sequential(
        *[layer for _ in range(9) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    )
    network.append(nn.Flatten()).append(nn.Linear(4 * 64, 2))
    chain = Chain.from_module(network.to("meta"), (4, 8, 8))
    images = torch.empty(16, 4, 8, 8, device="meta")

    def peak(forward):
        return tensor_peak_bytes(lambda: forward(images).sum().backward(), [network, images])

    thirds = [range(0, 3), range(3, 6), range(6, 10)]
    assert peak(recomputing_forward(chain, thirds)) < 0.6 * peak(chain.forward)
