"""Estimates of networks that take several inputs, compared with bytes counted by hand and with real steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import snugfit
from snugfit._core.estimate import PROCESS_EXTRA_BYTES
from snugfit._upstream import to_channels_last
from snugfit.errors import DataError, ModelError, UsageError
from snugfit.memory import tensor_peak_bytes

SCALAR = 4
"""The loss times its share of the step, which the plain loop does not have."""
SHAPES = ((3, 16, 12), "40xint64", (), "2xbool")
TEXT = "3x16x12,40xint64,float32,2xbool"
NAMES = ("photo", "words", "age", "flags")


class Fused(nn.Module):
    """Reads a photo, numbers of words, a number, and two flags that choose; cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.words, self.head = nn.Conv2d(3, 8, 3), nn.Embedding(50, 6), nn.Linear(15, 5)

    def forward(self, photo: Tensor, words: Tensor, age: Tensor, flags: Tensor) -> Tensor:
        assert words.dtype == torch.int64 and flags.dtype == torch.bool and age.dim() == 1
        values = [self.conv(photo).relu().mean((2, 3)), self.words(words).mean(1), age[:, None]]
        return self.head(torch.cat(values, 1)) * flags.all(1, keepdim=True)


class Divisible(Fused):
    """Can be divided where its inputs have met."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Sequential(nn.Linear(15, 200), nn.ReLU(), nn.Linear(200, 15), nn.ReLU())

    def forward(self, photo: Tensor, words: Tensor, age: Tensor, flags: Tensor) -> Tensor:
        values = [self.conv(photo).relu().mean((2, 3)), self.words(words).mean(1), age.unsqueeze(1)]
        return self.head(self.more(torch.cat(values, 1) * flags.all(1, keepdim=True)))


def example(batch: int) -> tuple[Tensor, ...]:
    """The inputs of a batch as a loader makes them."""
    words, flags = torch.randint(50, (batch, 40)), torch.ones(batch, 2, dtype=torch.bool)
    return torch.randn(batch, 3, 16, 12), words, torch.randn(batch), flags


def real_peak(module: nn.Module, batch: int, make: Callable[..., torch.optim.Optimizer]) -> int:
    """Peak tensor bytes of the second of two real steps, in the usual loop."""
    to_channels_last(module.train())
    optimizer = make(module.parameters(), lr=0.01, fused=True)

    def step() -> None:
        inputs, labels = example(batch), torch.zeros(batch, dtype=torch.int64)
        outputs = module(*inputs)
        F.cross_entropy(outputs, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [each for values in optimizer.state.values() for each in values.values() if torch.is_tensor(each)]
    return tensor_peak_bytes(step, [module, *state])


@pytest.mark.parametrize("make", [Fused, Divisible])
@pytest.mark.parametrize("batch", [3, 24])
def test_the_peak_is_that_of_a_real_step(make: type[nn.Module], batch: int) -> None:
    found = snugfit.estimate(make(), SHAPES, batch_size=batch, optimizer="adamw")
    assert found.divided == (make is Divisible)
    assert found.peak_bytes == real_peak(make(), batch, torch.optim.AdamW) + SCALAR


def test_inputs_count_in_their_own_types() -> None:
    (step,) = snugfit.estimate(Fused(), SHAPES, batch_size=7).steps
    assert step.whole["batch"] == 7 * (4 * 3 * 16 * 12 + 8 * 40 + 4 + 2 + 8), "with a label"


@pytest.fixture(scope="module")
def six() -> snugfit.Estimate:
    return snugfit.estimate(Fused(), SHAPES, batch_size=6)


@pytest.mark.parametrize(
    "given",
    [
        example(6),
        [*example(6)],
        dict(zip(NAMES, example(6), strict=True)),
        dict(zip(reversed(NAMES), reversed(example(6)), strict=True)),
        [each.to("meta") for each in example(6)],
        TEXT,
        {"words": "40xint64", "photo": (3, 16, 12), "flags": "2xbool", "age": ()},
        "words=40xint64,photo=3x16x12,flags=2xbool,age=float32",
    ],
)
def test_ways_to_say_what_a_network_takes(six: snugfit.Estimate, given: Any) -> None:
    options = {} if "tensor" in repr(given) else {"batch_size": 6}
    assert snugfit.estimate(Fused(), given, **options).steps == six.steps


def test_the_module_stays_as_it_is() -> None:
    module, given = Divisible().eval(), example(4)
    before = [(name, id(each), each._version) for name, each in module.state_dict(keep_vars=True).items()]
    versions = [each._version for each in given]
    snugfit.estimate(module, given)
    assert [(name, id(each), each._version) for name, each in module.state_dict(keep_vars=True).items()] == before
    assert [each._version for each in given] == versions and not module.training
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


def test_what_would_lower_the_peak() -> None:
    (step,) = snugfit.estimate(Divisible(), SHAPES, batch_size=256).steps
    lower = {each.name: each.peak_bytes for each in step.lower}
    assert lower["micro-batches"] < 0.4 * step.peak_bytes
    assert lower["recomputation"] > 0 and lower["gradients released"] <= step.peak_bytes
    (whole,) = snugfit.estimate(Fused(), SHAPES, batch_size=256).steps
    assert "cannot be divided" in {each.name: each.why for each in whole.lower}["recomputation"]


def test_precision_budget_and_measured_steps() -> None:
    found = snugfit.estimate(Fused(), SHAPES, batch_size=64, memory="37MB", precision="bfloat16", measure=True)
    full = snugfit.estimate(Fused(), SHAPES, batch_size=64)
    assert found.largest_batch >= 32 and found.steps[-1].batch_size == found.largest_batch
    assert found.steps[0].whole["activations"] < full.steps[0].whole["activations"]
    for step in found.steps:
        assert step.measured_bytes is not None and 0 < step.measured_bytes < step.peak_bytes + PROCESS_EXTRA_BYTES


def test_an_estimate_is_data_and_names_its_inputs() -> None:
    found = snugfit.estimate(Fused(), "photo=3x16x12,words=40xint64,age=float32,flags=2xbool", batch_size=2)
    assert snugfit.Estimate.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.input_shape == (1, 1, 3 * 16 * 12 + 40 + 1 + 2)
    assert [(each.shape, each.dtype, each.name) for each in found.inputs][1:3] == [
        ((40,), "int64", "words"), ((), "float32", "age"),
    ]  # fmt: skip
    said = "Inputs are photo 3x16x12 of float32, words 40 of int64, age a number of float32 and flags 2 of bool."
    assert "Fused, 604 parameters, 4 inputs, sgd" in str(found) and said in str(found).splitlines()
    assert snugfit.estimate("smallconv", (1, 8, 8), batch_size=2).inputs == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((3, 16, 12), r"an input of shape 3x16x12: .*'words', 'age', and 'flags'"),
        (SHAPES[:3], r"on inputs 3x16x12 of float32, 40 of int64 and a number of float32: .*'flags'"),
        ((*SHAPES, (1,)), r"on inputs .* and 1 of float32: .*5 positional arguments but 6"),
        ("photo=3x16x12,words=40xint64,ages=float32,flags=2xbool", r"unexpected keyword argument 'ages'"),
    ],
)
def test_a_wrong_number_of_inputs(given: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        snugfit.estimate(Fused(), given, batch_size=2)
    assert "Give what its forward pass takes, like --input-shape 3x224x224,16xint64." in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("5x16x12,40xint64,float32,2xbool", r"inputs 5x16x12 of float32, 40 .*: Invalid channel dimensions"),
        ("3x16x12,40xint64,2,2xbool", r"inputs .* 2 of float32 and 2 of bool"),
        ("3x16x12,40,float32,2xbool", r"inputs 3x16x12 of float32, 40 of float32"),
    ],
)
def test_a_wrong_shape_or_type(given: Any, said: str) -> None:
    with pytest.raises(ModelError, match=f"Fused does not run on {said}.*Check its forward pass and the inputs"):
        snugfit.estimate(Fused(), given, batch_size=2)


photos, numbers = torch.zeros(4, 3, 8, 8), torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((photos, numbers[:3]), r"batches of one size.*\(4, 3, 8, 8\) and \(3, 2\)"),
        ((photos, torch.tensor(1.0)), r"batches of one size.*\(4, 3, 8, 8\) and \(\)"),
        ((photos[:0], numbers[:0]), r"batches of one size.*\(0, 3, 8, 8\) and \(0, 2\)"),
        ((photos, (2,)), "of an example must be tensors alone, not tuple"),
        ({"photo": photos, "values": None}, "of an example must be tensors alone, not NoneType"),
        ((photos,), r"1 input\(s\), not several; give the tensor itself"),
        ((photos, numbers.to(torch.complex64)), "input 1 .* of complex64; inputs are floats"),
        ({"photo x": photos, "values": numbers}, "--input-shape must be"),
        ("3x8x8,", "--input-shape must be channels, height and width, .* or several inputs, like"),
        ("3x8x8,16xint46", "--input-shape must be"),
        ("3x8x8,0xint64", "--input-shape must be"),
        ("a=3x8x8,a=2", "--input-shape must be"),
        ("a=3x8x8,2", "--input-shape must be"),
        ("=3x8x8,2", "--input-shape must be"),
        ("16xint64", "--input-shape must be"),
        ("3,224,224", "--input-shape must be"),
        (((3, 8, 8), 2), "--input-shape must be"),
        (((3, 8, 8), (2.5,)), "--input-shape must be"),
        ({}, "--input-shape must be"),
        ((), "--input-shape must be"),
    ],
)
def test_what_is_no_input_is_refused(given: Any, said: str) -> None:
    with pytest.raises((UsageError, DataError), match=said):
        snugfit.estimate(Fused(), given, batch_size=2)


def test_an_image_may_have_more_values_than_an_input() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert snugfit.estimate(network, (3, 40_000, 40_000), batch_size=1).steps[0].whole["batch"] > 2**33
