"""Batches from a cache: the data room's order, exact resumption, and errors that come through."""

import os
import threading
from itertools import chain

import numpy as np
import pytest
import torch

from snugfit._storage.activation_cache import CacheWriter
from snugfit._training.batches import CachedBatches
from snugfit.errors import CheckpointError, UsageError

ROWS, SHAPE = 24, (2, 3, 3)


def numbered(rows=ROWS):
    """Rows that tell their own index."""
    return torch.arange(rows, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, *SHAPE).contiguous()


@pytest.fixture
def source(tmp_path):
    with CacheWriter(tmp_path, "c", ROWS, SHAPE, dtype="float16") as writer:
        writer.write(numbered(), torch.arange(ROWS) * 10)
        cache = writer.close()
    batches = CachedBatches(cache, seed=3)
    yield batches
    batches.close()


def indices(batches):
    """Row indices of every batch, after checking that features and labels belong together."""
    found = []
    for features, labels in batches:
        rows = features[:, 0, 0, 0].long()
        assert torch.equal(features, numbered()[rows]) and torch.equal(labels, rows * 10)
        assert features.is_contiguous(memory_format=torch.channels_last) and labels.dtype == torch.int64
        found.append(rows.tolist())
    return found


def test_epochs_are_shuffled_and_drop_the_rest(source):
    epochs = [indices(source.epoch(epoch, 7)) for epoch in range(2)]
    assert len(source) == ROWS and source.steps(7) == 3
    for epoch in epochs:
        rows = [*chain.from_iterable(epoch)]
        assert [len(batch) for batch in epoch] == [7, 7, 7] and len(set(rows)) == 21
    assert epochs[0] != epochs[1]
    assert epochs[0] == indices(source.epoch(0, 7))


def test_fewer_rows_than_a_batch_make_one_step(source):
    assert source.steps(100) == 1
    (only,) = indices(source.epoch(0, 100))
    assert sorted(only) == list(range(ROWS))


def test_resumed_epoch_goes_on_where_it_was(source):
    whole = indices(source.epoch(2, 5))
    for start in range(len(whole) + 1):
        assert indices(source.epoch(2, 5, start_step=start)) == whole[start:]


def test_parts_are_the_batch_in_nearly_equal_pieces(source):
    whole, parts = indices(source.epoch(1, 11, 1)), indices(source.epoch(1, 11, 1, parts=4))
    assert [len(part) for part in parts] == [3, 3, 3, 2] and [*chain.from_iterable(parts)] == whole[0]


def test_in_order(source):
    assert indices(source.in_order(9)) == [list(range(9)), list(range(9, 18)), list(range(18, 24))]


def test_views_take_turns(source):
    views = CachedBatches(source.cache, seed=3, views=3)
    assert len(views) == 8 and views.steps(4) == 2
    for epoch in range(5):
        view = epoch % 3
        assert sorted(chain.from_iterable(indices(views.epoch(epoch, 4)))) == list(range(8 * view, 8 * view + 8))
    assert indices(views.in_order(5)) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert indices(views.in_order(5, view=2)) == [[16, 17, 18, 19, 20], [21, 22, 23]]
    views.close()
    with pytest.raises(UsageError, match="5 views"):
        CachedBatches(source.cache, views=5)


def test_iterations_do_not_disturb_each_other(source):
    pairs = zip(source.epoch(0, 4), source.in_order(4), strict=True)
    mixed = [(a[0].clone(), b[0].clone()) for a, b in pairs]
    assert [a[:, 0, 0, 0].tolist() for a, _ in mixed] == indices(source.epoch(0, 4))
    kept = [features for features, _ in source.in_order(4)]
    assert torch.equal(torch.cat(kept), numbered())


def test_next_batch_is_read_while_this_one_is_used(source, monkeypatch):
    real, threads, second = source.cache.read_raw, [], threading.Event()

    def watched(rows, raw):
        threads.append(threading.current_thread())
        real(rows, raw)
        if len(threads) == 2:
            second.set()

    monkeypatch.setattr(source.cache, "read_raw", watched)
    batches = source.epoch(0, 4)
    next(batches)
    assert second.wait(10)
    assert len(threads) == 2
    next(batches)
    batches.close()
    assert len(threads) == 3
    assert threading.main_thread() not in threads and len(set(threads)) == 1


def test_errors_of_the_reading_thread_reach_the_consumer(source, tmp_path):
    batches = source.in_order(4)
    next(batches)
    os.truncate(tmp_path / "c.rows", 0)
    with pytest.raises(CheckpointError, match="truncated"):
        list(batches)
    with pytest.raises(CheckpointError, match="truncated"):
        next(source.epoch(0, 4))


def test_two_buffers_and_no_more(source, monkeypatch):
    real, made = source.cache.buffer, []

    def counting(rows):
        made.append(real(rows))
        return made[-1]

    monkeypatch.setattr(source.cache, "buffer", counting)
    list(source.epoch(0, 4))
    assert len(made) == 2 and sum(buffer.nbytes for buffer in made) == 2 * 4 * 36


def test_close_ends_the_thread(source):
    def readers():
        return [t for t in threading.enumerate() if t.name.startswith("snugfit-cache")]

    assert len(readers()) == 1
    source.close()
    assert readers() == []


@pytest.mark.parametrize(("batch", "start"), [(0, 0), (-1, 0), (4, -1)])
def test_impossible_batches_are_refused(source, batch, start):
    with pytest.raises(UsageError):
        source.epoch(0, batch, start)


def test_order_is_that_of_the_data_room(source):
    data = pytest.importorskip("snugfit._data.batches")
    images = type("Images", (), {"__len__": lambda _: ROWS, "images": lambda _, i: i, "labels": np.arange(ROWS) * 10})()
    from_images = data.Batches(images, lambda raw, *_: numbered()[torch.from_numpy(raw)], seed=3)
    for epoch in range(3):
        recomputed = [labels.tolist() for _, labels in from_images.epoch(epoch, 5)]
        assert [labels.tolist() for _, labels in source.epoch(epoch, 5)] == recomputed
