"""A user's own data sets."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from snugfit._data import from_dataset
from snugfit._data.prepared import AsIs
from snugfit.errors import DataError, UnknownNameError, UsageError


class Listed(Dataset):
    """A list of (image, label), which counts how often it is read."""

    def __init__(self, items, **attributes):
        self.items, self.reads = items, 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.reads += 1
        return self.items[index]


def items(count=20, shape=(3, 8, 8)):
    return [(torch.full(shape, i / 255), i % 2) for i in range(count)]


def test_float_images_become_bytes():
    splits = from_dataset(Listed(items()), val=Listed(items()), test=Listed(items(7)))
    assert splits.image_shape == (3, 8, 8) and splits.mean == (0.5, 0.5, 0.5) and splits.class_names == ("0", "1")
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [20, 20, 7]
    got = splits.train.images(np.array([5, 2]))
    assert got.dtype == torch.uint8 and got[:, 0, 0, 0].tolist() == [5, 2]


def test_missing_parts_are_split_off():
    splits = from_dataset(Listed(items(40)), class_names=("even", "odd"))
    assert [len(part) for part in (splits.train, splits.val, splits.test)] == [32, 4, 4]
    for part in (splits.train, splits.val, splits.test):
        assert np.array_equal(part.images(np.arange(len(part)))[:, 0, 0, 0].numpy(), part.indices)
        assert np.array_equal(part.labels, part.indices % 2)


def test_labels_are_taken_without_reading_images():
    data = Listed(items(), targets=[i % 2 for i in range(20)])
    from_dataset(data)
    assert data.reads <= 9, "the first, and a few whose labels are compared"
    images, labels = torch.zeros(20, 1, 8, 8, dtype=torch.uint8), torch.arange(20) % 4
    splits = from_dataset(Subset(TensorDataset(images, labels), [4, 5, 6, 7]), TensorDataset(images, labels))
    assert splits.train.labels.tolist() == [0, 1, 2, 3]


def test_transformed_targets_are_not_taken_from_the_attribute():
    data = Listed(items(), targets=[9] * 20, target_transform=lambda label: label)
    assert set(from_dataset(data).train.labels) == {0, 1}


def test_pil_images():
    photos = [(Image.new("RGB", (20, 12), (i, 0, 0)), i % 2) for i in range(20)]
    splits = from_dataset(Listed(photos), val=Listed(photos))
    assert splits.image_shape == (3, 12, 12)
    assert splits.train.images(np.arange(20))[:, 0].float().mean((1, 2)).tolist() == list(range(20))
    grey = [(photo.convert("L"), label) for photo, label in photos]
    assert from_dataset(Listed(grey), image_size=6).image_shape == (1, 6, 6)


def test_image_size_resizes_tensors():
    splits = from_dataset(Listed(items(shape=(1, 10, 6))), image_size=4)
    assert splits.train.images(np.arange(3)).shape == (3, 1, 4, 4)


def broken(index, item):
    data = items()
    data[index] = item
    return Listed(data, targets=[i % 2 for i in range(20)])


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((torch.zeros(1, 8, 8), 0), r"image 3 has 1 channel\(s\), but the first has 3"),
        ((torch.zeros(3, 9, 8), 0), r"image 3 is \(9, 8\) pixels"),
        ((torch.zeros(8, 8, 3), 0), r"image 3 has shape \(8, 8, 3\)"),
        (
            (torch.full((3, 8, 8), -1.5), 0),
            r"image 3 holds values from -1\.5 to -1\.5, not 0 to 1\. Leave out",
        ),
        ((torch.full((3, 8, 8), float("nan")), 0), r"image 3 holds NaN or infinite values. Replace or remove it"),
        ((torch.zeros(3, 8, 8, dtype=torch.int64), 0), r"image 3 is of torch\.int64; images are uint8, or float in"),
        (("photo", 0), r"image 3 is a str"),
        ((Image.new("L", (8, 8)), 0), r"image 3 has mode L"),
        (torch.zeros(3, 8, 8), r"item 3 of the data set is not a pair"),
    ],
)
def test_bad_image_is_named(item, message):
    splits = from_dataset(broken(3, item), val=Listed(items()))
    with pytest.raises(DataError, match=message):
        splits.train.images(np.arange(5))


@pytest.mark.parametrize("error", [OSError("truncated"), ValueError("corrupt record"), IndexError("out of range")])
def test_an_error_of_the_data_sets_own_code_names_the_item(error):
    class Failing(Listed):
        def __getitem__(self, index):
            if index == 4:
                raise error
            return super().__getitem__(index)

    with pytest.raises(DataError, match=f"item 4 of the data set failed: {type(error).__name__}: {error}"):
        from_dataset(Failing(items()))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Listed([]), {}, "train data set is empty"),
        (Listed([(torch.zeros(3, 8, 8), 0.5)] * 4), {}, "not one integer per image"),
        (Listed([(torch.zeros(3, 8, 8), 0)] * 4), {}, "only one class"),
        (Listed(items()), {"class_names": ("a", "b"), "val": Listed([(torch.zeros(3, 8, 8), 2)])}, "has label 2"),
        (Listed([(torch.zeros(3, 8, 8), -1), (torch.zeros(3, 8, 8), 3)]), {}, r"label -1, .* Number .* from 0\.$"),
        (Listed(items(shape=(3, 8, 6))), {}, "must be square"),
        (Listed(items()), {"classes": 5}, "has 2 classes, not 5"),
    ],
)
def test_bad_data_set(data, options, message):
    with pytest.raises(DataError, match=message):
        from_dataset(data, **options)


def test_labels_that_ask_for_too_many_classes_are_refused():
    images = TensorDataset(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 0, 3_000_000_000]))
    with pytest.raises(DataError, match="3,000,000,001 classes are more than 100,000"):
        from_dataset(images)


MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def normalised(count=20):
    """Items as ``Compose([ToTensor(), Normalize(MEAN, STD)])`` gives them, and their bytes."""
    rng, pairs = np.random.default_rng(0), []
    every = torch.from_numpy(rng.integers(0, 256, (count, 3, 8, 8), dtype=np.uint8))
    for label, image in enumerate(every):
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        pairs.append(((image / 255 - mean) / std, label % 2))
    return pairs, every


def test_normalised_images_are_taken_back_to_their_bytes():
    pairs, every = normalised()
    splits = from_dataset(pairs, pairs, items(), mean=MEAN, std=STD)
    assert (splits.mean, splits.std) == (MEAN, STD)
    assert torch.equal(splits.train.images(np.arange(20)), every)
    plain = torch.stack([image for image, _ in items()])
    assert torch.equal(splits.test.images(np.arange(20)), (plain * 255).round().to(torch.uint8)), "it never was"


def test_the_error_over_normalised_images_names_what_exists():
    pairs, _ = normalised()
    with pytest.raises(DataError, match=r"image 2 holds values .*\n.*snugfit\.from_dataset\(.*mean=.*std=") as said:
        from_dataset(pairs, pairs).train.images([2])
    assert str(said.value).count("\n") == 1
    whole = [(torch.rand(3, 8, 8) * 255, 0) for _ in range(8)]
    with pytest.raises(DataError, match="also with mean and std undone"):
        from_dataset(whole, pairs, mean=MEAN, std=STD, class_names="ab").train.images([0])


@pytest.mark.parametrize(
    "given", [{"mean": MEAN}, {"std": STD}, {"mean": (0.5,), "std": (0.5,)}, {"mean": MEAN, "std": (0, 1, 1)},
              {"mean": (float("nan"), 0, 0), "std": STD}],
)  # fmt: skip
def test_statistics_that_make_no_sense(given):
    with pytest.raises(UsageError, match="mean"):
        from_dataset(items(), **given)


@pytest.mark.parametrize("place", range(3))
def test_the_data_set_of_a_data_loader_is_used_with_a_note(place):
    given, plain = [items(), items(), items()], from_dataset(items(), items(), items())
    given[place] = DataLoader(items(), batch_size=4, shuffle=place == 0)
    found = from_dataset(*given)
    assert torch.equal(found.train.images(np.arange(5)), plain.train.images(np.arange(5)))
    name = ("train", "val", "test")[place]
    assert found.notes == (f"the {name} data is a DataLoader: its data set is used, in batches of --batch-size",)


@pytest.mark.parametrize("options", [{"collate_fn": list}, {"sampler": WeightedRandomSampler([0.5] * 20, 20)}])
def test_a_data_loader_with_batches_of_its_own_is_refused(options):
    with pytest.raises(UsageError, match=r"own sampler or collate_fn, .* loader\.dataset, .* as batch_size="):
        from_dataset(DataLoader(items(), batch_size=4, **options))


class Balanced(BatchSampler):
    """Batches of its own."""


@pytest.mark.parametrize(
    "options",
    [
        {"batch_sampler": Balanced(SequentialSampler(range(20)), 4, False)},
        {"batch_sampler": BatchSampler(WeightedRandomSampler([0.5] * 20, 20), 4, False)},
        {"sampler": RandomSampler(range(20), replacement=True)},
        {"sampler": RandomSampler(range(20), num_samples=7)},
    ],
)
def test_a_data_loader_that_repeats_or_leaves_out_items_is_refused(options):
    assert len(items()) == 20
    with pytest.raises(UsageError, match="own sampler or collate_fn"):
        from_dataset(DataLoader(items(), **options))


@pytest.mark.parametrize("image", ["image", "pixel_values", "img"])
@pytest.mark.parametrize("label", ["label", "labels"])
def test_items_may_be_dictionaries(image, label):
    found = from_dataset([{"id": 7, label: number, image: pixels} for pixels, number in items()], items())
    assert torch.equal(found.train.images(np.arange(9)), from_dataset(items(), items()).train.images(np.arange(9)))
    assert found.train.labels.tolist() == [number for _, number in items()]


@pytest.mark.parametrize(
    ("item", "said"),
    [({"photo": 1, "label": 0}, "has photo, label, but none of image, pixel_values, img"),
     ({"image": torch.zeros(3, 8, 8), "class": 0}, "has image, class, but none of label, labels")],
)  # fmt: skip
def test_dictionaries_without_image_or_label_are_refused(item, said):
    with pytest.raises(DataError, match=f"item 3 of the data set {said}"):
        from_dataset(broken(3, item), val=Listed(items())).train.images([3])


def wide(count=20, seed=0):
    """Images of 6 x 10 pixels as a transform of one's own gives them, beyond [0, 1]."""
    made = torch.randn(count, 2, 6, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return [(image, number % 2) for number, image in enumerate(made)]


def test_prepared_images_are_used_as_they_are():
    found = from_dataset(wide(), wide(8), as_is=True)
    assert (found.image_shape, found.as_is, len(found.train), len(found.val)) == ((2, 6, 10), True, 20, 8)
    read = found.train.images(np.array([5, 2]))
    assert read.dtype == torch.float32 and read.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(read, torch.stack([wide()[5][0], wide()[2][0]]).float())
    assert torch.equal(AsIs((0.0,) * 2, (1.0,) * 2, False)(read, train=True, seed=3), read)
    assert len(from_dataset(wide(40), as_is=True).test) == 4, "missing parts are split off as always"


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ((torch.zeros(2, 6, 9), 0), r"image 3 has shape \(2, 6, 9\), but the first has \(2, 6, 10\)"),
        ((torch.full((2, 6, 10), float("inf")), 0), "image 3 holds NaN or infinite values"),
        (
            (torch.zeros(2, 6, 10, dtype=torch.uint8), 0),
            r"image 3 is of torch\.uint8 .*; as_is=True takes float",
        ),
        ((Image.new("L", (8, 8)), 0), "image 3 is <class 'PIL.Image.Image'>; as_is=True takes float tensors"),
    ],
)
def test_bad_prepared_images_are_named(item, said):
    data = wide()
    data[3] = item
    with pytest.raises(DataError, match=said):
        from_dataset(data, wide(), as_is=True).train.images(np.arange(5))


@pytest.mark.parametrize("options", [{"image_size": 8}, {"flip": True}, {"mean": (0.5,) * 2, "std": (0.5,) * 2}])
def test_prepared_images_are_not_changed(options):
    with pytest.raises(UsageError, match=f"as_is=True uses images as they are; leave out {next(iter(options))}"):
        from_dataset(wide(), as_is=True, **options)


def test_large_sums_in_float16_are_finite():
    data = [(torch.full((3, 128, 128), 2.0, dtype=torch.float16), number % 2) for number in range(4)]
    assert data[0][0].sum().isinf()
    assert from_dataset(data, data, as_is=True).train.images(np.arange(2)).eq(2).all()


def test_what_has_no_length_is_no_data_set():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(items())

    for given in (Stream(), iter(items())):
        with pytest.raises(UsageError, match=r"which has no length or no items by number. Give a map-style Dataset"):
            from_dataset(given)


def test_an_unknown_option_is_named():
    with pytest.raises(UnknownNameError, match=r"unknown option 'means'\. Did you mean 'mean'\?"):
        from_dataset(items(), means=MEAN)
