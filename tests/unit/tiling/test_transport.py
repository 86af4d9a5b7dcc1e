"""Sums and moments over processes, with synthetic others."""

from dataclasses import dataclass, field

import pytest
import torch

from snugfit.tiling.statistics import all_moments
from snugfit.tiling.transport import (
    BUCKET_BYTES,
    DryRunTransport,
    Gathered,
    OverlappedAllReduce,
    all_reduce,
    buckets,
    flattened,
)


def test_moments_of_parts_are_those_of_the_whole():
    whole = torch.randn(3, 4, 6, 10, dtype=torch.float64) * 3 + 100
    parts = [whole[..., :3], whole[..., 3:9], whole[..., 9:], whole[..., :0]]
    mean, variance = all_moments(parts, [whole.numel() // 4], torch.empty(4, dtype=torch.float64), DryRunTransport())
    torch.testing.assert_close(mean, whole.mean((0, 2, 3)))
    torch.testing.assert_close(variance, whole.var((0, 2, 3), correction=0), rtol=1e-9, atol=1e-9)


def test_a_channel_that_never_differs_has_no_variance():
    same = torch.full((2, 1, 3, 3), 7.0)
    mean, variance = all_moments([same], [18], torch.empty(1), DryRunTransport())
    assert mean.item() == 7 and variance.item() == 0


def test_moments_have_shapes_without_memory_too():
    mean, variance = all_moments(
        [torch.empty(2, 3, 4, 4, device="meta")], [32], torch.empty(3, device="meta"), DryRunTransport()
    )
    assert mean.is_meta and mean.shape == variance.shape == (3,)


def test_moments_of_other_processes_count_by_their_pixels():
    own, other = torch.randn(1, 2, 4, 4, dtype=torch.float64), torch.randn(1, 2, 4, 7, dtype=torch.float64)
    like = torch.empty(2, dtype=torch.float64)

    @dataclass(frozen=True)
    class Two(DryRunTransport):
        size: int = 2
        seen: list = field(default_factory=list)

        def gather(self, tensor):
            theirs = torch.stack([other.mean((0, 2, 3)), other.var((0, 2, 3), correction=0) * 28])
            return Gathered([tensor, theirs])

    mean, variance = all_moments([own], [16, 28], like, Two())
    both = torch.cat([own, other], 3)
    torch.testing.assert_close(mean, both.mean((0, 2, 3)))
    torch.testing.assert_close(variance, both.var((0, 2, 3), correction=0))


def test_many_tensors_travel_in_few_messages():
    tensors = [torch.zeros(n) for n in (10, 10, BUCKET_BYTES // 4, 1, BUCKET_BYTES, 5)]
    assert [len(some) for some in buckets(tensors)] == [2, 1, 1, 1, 1]
    assert buckets([]) == []


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_tensors_get_what_their_message_holds(layout):
    first, second = torch.ones(2, 3, 4, 4).contiguous(memory_format=layout), torch.ones(3, dtype=torch.int64)
    with flattened([first, second]) as flat:
        flat.mul_(5)
    assert (first == 5).all() and (second == 5).all() and first.is_contiguous(memory_format=layout)


def test_sums_of_other_processes():
    @dataclass(frozen=True)
    class Doubling(DryRunTransport):
        size: int = 2

        def all_reduce(self, flat):
            return Gathered([flat.mul_(2)])

    tensors = [torch.arange(4.0), torch.ones(2, 2)]
    all_reduce(tensors, Doubling())
    assert tensors[0].tolist() == [0, 2, 4, 6] and tensors[1].tolist() == [[2, 2], [2, 2]]


def test_whole_numbers_alone_travel_as_such():
    counts = [torch.tensor(2**40 + 1), torch.tensor([3, 4])]
    with flattened(counts) as flat:
        assert flat.dtype == torch.int64
        flat.add_(1)
    assert [each.tolist() for each in counts] == [2**40 + 2, [4, 5]]


def test_sums_that_run_beside_other_work_are_few_at_once():
    events = []

    @dataclass(frozen=True)
    class Work:
        flat: torch.Tensor

        def wait(self):
            events.append("end")
            self.flat.mul_(2)

    @dataclass(frozen=True)
    class Doubling(DryRunTransport):
        size: int = 2

        def all_reduce(self, flat):
            events.append("begin")
            return Work(flat)

    tensors = [torch.ones(n, 2) for n in (BUCKET_BYTES // 8, BUCKET_BYTES // 8, 3, BUCKET_BYTES // 8, 5)]
    sums = OverlappedAllReduce(Doubling())
    sums.add(tensors[:3])
    assert events == ["begin", "begin"]
    sums.add(tensors[3:])
    assert events == ["begin", "begin", "end", "begin"]
    sums.wait()
    assert events.count("begin") == events.count("end") == 4
    assert all((tensor == 2).all() for tensor in tensors)
