"""Items of several inputs: read exactly, and refused by name where they cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from snugfit._core.inputs import Input, packed_shape
from snugfit._data import from_dataset
from snugfit.errors import DataError, UsageError


def pair(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 3, 4, generator=generator), torch.tensor([number, -7])


def items(count: int = 20) -> list:
    return [(pair(number), number % 2) for number in range(count)]


def as_dicts(count: int = 20) -> list:
    return [
        {"photo": pair(number)[0], "age": np.float64(number / 8), "id": str(number), "label": number % 2}
        for number in range(count)
    ]


def test_inputs_are_read_as_they_are_one_after_another():
    found = from_dataset(items(), items(8))
    assert found.inputs == (Input((2, 3, 4)), Input((2,), "int64"))
    assert (found.image_shape, found.as_is) == ((1, 1, 26), True) == (packed_shape(found.inputs), True)
    expected = [torch.cat([pair(number)[0].flatten(), pair(number)[1].float()]) for number in (5, 2)]
    assert torch.equal(found.train.images(np.array([5, 2])).view(2, 26), torch.stack(expected))
    assert found.train.labels.tolist() == [number % 2 for number in range(20)]
    assert len(from_dataset(items(40)).test) == 4, "missing parts are split off as always"


def test_keys_of_dictionaries_are_keywords_of_forward():
    found = from_dataset(as_dicts(), as_dicts(), inputs=("photo", "age"))
    assert found.inputs == (Input((2, 3, 4), "float32", "photo"), Input((), "float32", "age"))
    assert found.train.images(np.array([3]))[0, 0, 0, -1] == 3 / 8
    nested = [({"a": one, "b": two}, label) for (one, two), label in items()]
    assert [each.name for each in from_dataset(nested, nested).inputs] == ["a", "b"]


def test_flipped_arrays_and_outputs_of_other_networks_are_read():
    given = [((pair(0)[0].numpy()[:, ::-1], torch.ones(2, requires_grad=True) * 3), index % 2) for index in range(20)]
    values = from_dataset(given, given).train.images(np.array([0])).view(-1)
    assert torch.equal(values, torch.cat([pair(0)[0].flip(1).flatten(), torch.full((2,), 3.0)]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((torch.zeros(2, 3, 4),), r"item 3 has 1 input\(s\), but the first has 2"),
        ((*pair(3), torch.zeros(2)), r"item 3 has 3 input\(s\), but the first has 2"),
        (torch.zeros(2, 3, 4), r"item 3 has no several inputs, but the first has 2"),
        ((torch.zeros(2, 3, 5), pair(3)[1]), r"input 0 of item 3 is 2x3x5 of float32, .* first is 2x3x4 of float32"),
        ((pair(3)[0], pair(3)[1].float()), r"input 1 of item 3 is 2 of float32, .* first is 2 of int64"),
        ((pair(3)[0], [1, 2]), r"input 1 of item 3 is a list, not a dense tensor, an array"),
        ((pair(3)[0], Image.new("L", (2, 1))), "input 1 of item 3 is a Image, not a dense tensor"),
        ((pair(3)[0] + float("nan"), pair(3)[1]), "input 0 of item 3 holds NaN, or values"),
        ((np.full((2, 3, 4), 1e300), pair(3)[1]), "input 0 of item 3 holds NaN, or values that float32 cannot"),
        ((np.full((2, 3, 4), "a"), pair(3)[1]), "input 0 of item 3 is a ndarray, not a dense tensor"),
        ((pair(3)[0].to_sparse(), pair(3)[1]), "input 0 of item 3 is a Tensor, not a dense tensor"),
        ((pair(3)[0], torch.tensor([2**24 + 1, 0])), r"input 1 of item 3 holds 16,777,217; .* 16,777,216"),
    ],
)
def test_items_unlike_the_first_are_named(given, said):
    data = items()
    data[3] = (given, 0)
    with pytest.raises(DataError, match=said):
        from_dataset(data, items()).train.images(np.arange(5))


@pytest.mark.parametrize(
    ("item", "options", "said"),
    [
        ((*pair(0), 1), {}, r"item 0 of the data set is not a pair .*Several inputs are written \(\(a, b\), label\)"),
        (((pair(0)[0],), 1), {}, r"item 0 has 1 input\(s\), not several; give the tensor itself"),
        (((), 1), {}, r"item 0 has 0 input\(s\), not several"),
        (((torch.zeros(2, dtype=torch.complex64), pair(0)[0]), 1), {}, r"input 0 of item 0 is of complex64"),
        (((torch.zeros(0), pair(0)[0]), 1), {}, r"input 0 of item 0 is empty"),
        ((pair(0), 1), {"inputs": ("a", "b")}, r"item 0 of the data set is no dictionary, .* inputs="),
        ({"a": 1, "label": 0}, {"inputs": ("a", "b")}, r"item 0 of the data set has a, label, but none of b"),
        ({"a": 1, "b": 2, "label": 0}, {}, r"has a, b, label, but none of image.* inputs="),
    ],
)
def test_first_items_that_cannot_be_used(item, options, said):
    with pytest.raises(DataError, match=said):
        from_dataset([item] * 20, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"image_size": 8},
        {"flip": True},
        {"mean": (0.5,) * 2, "std": (0.5,) * 2},
        {"inputs": ("a", "a")},
        {"inputs": ("a",)},
        {"inputs": "ab"},
        {"inputs": (1, 2)},
    ],
)
def test_options_of_images_are_refused(options):
    with pytest.raises(UsageError, match=f"{next(iter(options))}"):
        from_dataset(items(), **options)
