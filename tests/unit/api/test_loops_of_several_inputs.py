"""Loops of one's own over networks that take several inputs, by position or by keyword."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snugfit
from snugfit.errors import DataError, ModelError, UsageError

SETTINGS = {"lr": 0.05, "weight_decay": 1e-3}


class Both(nn.Module):
    """Takes a photo (2, 8, 8), and the number of a word."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        self.conv, self.words = nn.Conv2d(2, 8, 3), nn.Embedding(5, 8)
        self.drop, self.more = nn.Dropout(0.5), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, photo: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        if self.branches and not self.training:
            return self.more(self.words(word))
        return self.more(self.drop(self.conv(photo).relu().mean((2, 3))) + self.words(word))


def made(branches=False):
    torch.manual_seed(0)
    network = Both(branches)
    network.drop.p = 0.0
    return network


def batches(*sizes):
    torch.manual_seed(1)
    return [((torch.randn(n, 2, 8, 8), torch.randint(5, (n,))), torch.randint(3, (n,))) for n in sizes]


def by_name(pair):
    return {"word": pair[1], "photo": pair[0]}


@pytest.mark.parametrize("given", [tuple, list, by_name])
@pytest.mark.parametrize("branches", [False, True])
def test_the_weights_are_those_of_a_plain_loop(given, branches):
    model, data = made(branches), batches(8, 8, 5)
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), momentum=0.9, **SETTINGS)
    example = given(data[0][0]), data[0][1]
    with snugfit.fit(model, F.cross_entropy, memory="1GB", batch_size=8, example=example, **SETTINGS) as step:
        for inputs, targets in data:
            model.eval()
            model.train()
            loss = step(given(inputs), targets)
            optimizer.zero_grad()
            expected = F.cross_entropy(other(*inputs), targets)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert not model._forward_pre_hooks and torch.equal(model(*data[0][0]), model(**by_name(data[0][0])))


@pytest.mark.parametrize("branches", [False, True])
def test_layers_are_in_the_modes_of_the_model(branches):
    (((photos, words), targets),) = batches(8)
    model = made(branches)
    model.drop.p = 1.0
    losses = {}
    with snugfit.fit(
        model, F.cross_entropy, memory="1GB", batch_size=8, example=((photos, words), targets), lr=1e-9
    ) as step:
        for training in (True, False):
            model.train(training)
            losses[training] = step((photos, words), targets)
    dropped = F.cross_entropy(model.more(model.words(words)), targets)
    torch.testing.assert_close(losses[True], dropped.detach())
    assert torch.equal(losses[True], losses[False]) == branches


def wide():
    """Photos (3, 96, 96) and a word to logits (B, 10), in blocks of which two share weights."""
    import torch
    from torch import nn

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.words, self.head = nn.Conv2d(3, 16, 3), nn.Embedding(5, 16), nn.Linear(16, 10)
            blocks = [[nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU()] for _ in range(5)]
            blocks[1][0].weight = blocks[0][0].weight
            self.blocks = nn.Sequential(*(nn.Sequential(*block) for block in blocks))

        def forward(self, photo, word):
            return self.head(self.blocks(self.stem(photo)).mean((2, 3)) + self.words(word))

    torch.manual_seed(0)
    return Wide()


def within_a_budget():
    import torch

    import snugfit

    snugfit.prepare_process(1)
    example, loss = (
        ((torch.randn(8, 3, 96, 96), torch.arange(8) % 5), torch.arange(8)),
        torch.nn.functional.cross_entropy,
    )
    found = []
    for memory in ("300MB", "30MB"):
        with snugfit.fit(wide(), loss, example=example, memory=memory, batch_size=8) as step:
            for _ in range(3):
                step(*example)
        found.append(vars(step.record))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")
def test_measured_is_at_most_predicted_which_is_at_most_the_budget(fresh_process):
    records = fresh_process(within_a_budget, helpers=(wide,))["within_a_budget"]
    for record in records:
        assert record["enforced"] and record["steps"] == 3
        assert 0 < record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"], record
    ample, small = records
    assert (ample["micro_batches"], ample["recomputation"]) == (1, "")
    assert small["micro_batches"] > 1 and small["recomputation"].startswith("modules (")


((GOOD, TARGETS),) = batches(4)


def test_inputs_that_want_gradients_are_trained_on_without():
    inputs = (GOOD[0].clone().requires_grad_() * 1, GOOD[1])
    with snugfit.fit(made(), F.cross_entropy, memory="1GB", batch_size=4, example=(inputs, TARGETS)) as step:
        assert step(inputs, TARGETS) > step(inputs, TARGETS)
    assert inputs[0].grad_fn is not None


@pytest.mark.parametrize(
    ("inputs", "error", "text"),
    [
        (GOOD[:1], DataError, "not several; give the tensor itself"),
        ((GOOD[0].double(), GOOD[1]), UsageError, "inputs are float32, integers or booleans, not torch.float64"),
        ((GOOD[0], GOOD[1][:3]), UsageError, "must be batches of one size"),
        ((), UsageError, "at least two tensors"),
        ({}, UsageError, "at least two tensors"),
        ((GOOD[0][:0], GOOD[1][:0]), UsageError, "must be batches of one size"),
        ({1: GOOD[0], "text": GOOD[1]}, UsageError, "need strings as keys"),
        ((GOOD[0], 3), UsageError, "must be tensors alone, not int"),
        ((GOOD[0], GOOD[1] + 2**25), DataError, "up to 16,777,216"),
        ((GOOD[1], GOOD[0]), ModelError, "does not run on inputs a number of int64 and 2x8x8 of float32"),
        ({"photo": GOOD[0], "text": GOOD[1]}, ModelError, "unexpected keyword argument 'text'"),
    ],
)
def test_inputs_that_cannot_be_used_are_refused(inputs, error, text):
    given = {"memory": "1GB", "batch_size": 4, "example": (inputs, TARGETS)}
    with pytest.raises(error, match=text), snugfit.fit(made(), F.cross_entropy, **given):
        pass


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (GOOD[0], "4 images and 4 targets of shapes"),
        (tuple(reversed(GOOD)), r"of shapes \['a number of int64 and 2x8x8 of float32'"),
        ((GOOD[0], GOOD[1].int()), "a number of int32"),
        ((GOOD[0][:3], GOOD[1][:3]), "3 images and 4 targets"),
        (by_name(GOOD), "photo 2x8x8 of float32"),
    ],
)
def test_a_step_refuses_what_it_was_not_planned_for(inputs, text):
    with snugfit.fit(made(), F.cross_entropy, memory="1GB", batch_size=4, example=(GOOD, TARGETS)) as step:
        with pytest.raises(UsageError, match=text):
            step(inputs, TARGETS)
        with pytest.raises(UsageError, match="targets of a step must be a tensor, as in the example, not list"):
            step(GOOD, [0, 1, 2, 0])
        step(GOOD, TARGETS)
