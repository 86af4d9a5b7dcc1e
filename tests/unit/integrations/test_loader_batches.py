"""Batches of a loader in parts: the same images in the same order."""

from collections import UserDict
from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from snugfit.errors import UsageError
from snugfit.integrations._batches import (
    batch_size_of,
    bytes_of,
    divided,
    example_of,
    first_of,
    first_tensor,
    images_of,
)

CPU = torch.device("cpu")


def loader_of(count, **options):
    return DataLoader(TensorDataset(torch.arange(count), torch.arange(count) * 10.0), **options)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("count", "parts"), [(24, 1), (24, 4), (30, 4), (29, 4), (18, 4), (3, 2)])
def test_parts_are_the_batches_in_order(count, parts, drop_last):
    whole = loader_of(count, batch_size=8, shuffle=True, drop_last=drop_last)
    made, batches = divided(whole)
    batches.parts = parts
    torch.manual_seed(5)
    expected = [indices.tolist() for indices, _ in whole]
    torch.manual_seed(5)
    found = [indices.tolist() for indices, _ in made]
    assert len(found) == len(made) and [*chain(*found)] == [*chain(*expected)]
    assert all(len(each) == 8 // parts for each in found[: len(expected[:-1]) * parts])
    steps = [found[start : start + parts] for start in range(0, len(found), parts)]
    assert [[*chain(*step)] for step in steps] == expected, "a library steps after so many parts"
    for step in steps:
        assert max(map(len, step)) - min(map(len, step)) <= 1, "all parts count alike"


def test_what_a_loader_does_besides_is_kept():
    generator = torch.Generator().manual_seed(1)
    whole = loader_of(8, batch_size=4, generator=generator, collate_fn=list)
    made, _ = divided(whole)
    assert made.generator is generator and made.collate_fn is list and made.dataset is whole.dataset


class Negating(DataLoader):
    """Changes the batches on their way, by an attribute of its own."""

    sign = -1

    def __iter__(self):
        return (self.sign * batch[0] for batch in super().__iter__())


def test_a_loader_keeps_its_class_and_its_sampler():
    loader = Negating(TensorDataset(torch.arange(8)), batch_size=4, shuffle=True)
    loader.sign = -2
    made, batches = divided(loader)
    batches.parts = 2
    assert made.sampler is loader.sampler
    parts = list(made)
    assert [len(each) for each in parts] == [2, 2, 2, 2]
    assert sorted(torch.cat(parts).tolist()) == [-2 * value for value in range(7, -1, -1)]
    assert [len(each) for each in loader] == [4, 4]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize("loader", [DataLoader(Stream(), batch_size=2), loader_of(4, batch_size=None)])
def test_batches_of_unknown_size_are_refused(loader):
    with pytest.raises(UsageError, match="a DataLoader with a batch_size"):
        batch_size_of(loader)


def test_an_example_of_a_stream_is_refused():
    with pytest.raises(UsageError, match="of a Dataset with indices"):
        example_of(DataLoader(Stream(), batch_size=2), 2, CPU)


def test_an_example_of_no_items_is_refused():
    with pytest.raises(UsageError, match="the loader's data set is empty"):
        example_of(loader_of(0, batch_size=2), 2, CPU)


def test_batches_of_tokenizers_are_parts_of_the_same_kind():
    batch = UserDict(tokens=torch.zeros(4, 3), scale=torch.zeros(2))
    some = first_of(batch, 2)
    assert isinstance(some, UserDict) and some["tokens"].shape == (2, 3) and batch["tokens"].shape == (4, 3)
    assert images_of(batch) == 4 and images_of(some) == 2 and bytes_of(batch) == 4 * (12 + 2)
    whole = DataLoader(range(4), collate_fn=lambda items: UserDict(tokens=torch.tensor(items)))
    assert example_of(whole, 3, CPU)["tokens"].tolist() == [0, 1, 2]


def test_an_example_has_the_first_items_and_draws_nothing():
    before = torch.get_rng_state()
    indices, values = example_of(loader_of(3, batch_size=2, shuffle=True), 5, CPU)
    assert indices.tolist() == [0, 1, 2, 0, 1] and values.tolist() == [0, 10, 20, 0, 10]
    assert torch.equal(torch.get_rng_state(), before)


def test_parts_of_a_batch_are_views_of_what_has_a_row_per_image():
    batch = {"images": torch.zeros(4, 3), "labels": torch.zeros(4), "scale": torch.zeros(2), "names": ["a", "b"]}
    some = first_of(batch, 2)
    assert [each.shape[0] for each in (some["images"], some["labels"], some["scale"])] == [2, 2, 2]
    assert some["images"].data_ptr() == batch["images"].data_ptr() and some["names"] == ["a", "b"]
    assert images_of(batch) == 4 and images_of(some) == 2 and bytes_of(batch) == 4 * (12 + 4 + 2)
    with pytest.raises(UsageError, match="needs batches of tensors"):
        first_tensor({"names": ["a"]})


def test_an_example_has_the_items_that_an_order_puts_first():
    loader = loader_of(3, batch_size=2)
    found, _ = example_of(loader, 5, CPU, lambda dataset: [*reversed(range(len(dataset)))])
    assert found.tolist() == [2, 1, 0, 2, 1]
