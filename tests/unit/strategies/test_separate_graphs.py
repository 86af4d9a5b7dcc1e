"""Graphs of single parts: the same gradients, freed one after another."""

import gc
import weakref

import pytest
import torch
from torch import nn

from snugfit.memory.tensors import tensor_peak_bytes
from snugfit.strategies.recomputation.paging import recomputing_forward
from snugfit.strategies.recomputation.schedule import Schedule
from snugfit.strategies.recomputation.separate_graphs import SeparateGraphs

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("out of memory")


class Marked(torch.autograd.Function):
    """The same values; its node holds a mark."""

    @staticmethod
    def forward(ctx, values, mark):
        ctx.mark = mark
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Mark:
    pass


def units(seed=0):
    torch.manual_seed(seed)
    return [
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)),  # overwrites what the unit before made
        nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.5)),
        nn.Sequential(nn.Flatten(), nn.Linear(256, 5)),
    ]


def gradients(modules, forward, times=1):
    torch.manual_seed(3)
    for _ in range(times):
        forward(IMAGES).square().sum().backward()
    return [parameter.grad for module in modules for parameter in module.parameters()]


@pytest.mark.parametrize("schedule", ["(0-1) 2-3", "(0) 1-3", "((0) 1-2) 3", "(0-2) (3)", "0-2 (3)"])
@pytest.mark.parametrize("times", [1, 2])
def test_gradients_equal_those_of_one_graph_bit_for_bit(schedule, times):
    plain, cut = units(), units()
    expected = gradients(plain, nn.Sequential(*plain), times)
    found = gradients(cut, recomputing_forward(cut, Schedule.parse(schedule)), times)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_frozen_units_need_no_graph():
    plain, cut = units(), units()
    for module in (*plain[:2], *cut[:2]):
        module.requires_grad_(False)
    expected = gradients(plain, nn.Sequential(*plain))
    found = gradients(cut, recomputing_forward(cut, Schedule.parse("(0-1) 2-3")))
    assert [each is None for each in found] == [True] * 6 + [False] * 4
    for one, other in zip(found[6:], expected[6:], strict=True):
        assert torch.equal(one, other)


def graph_of_three(graphs):
    """The output of three parts that double, and weak references to their nodes' marks."""
    marks = [Mark() for _ in range(3)]
    values = torch.ones(2, requires_grad=True)
    for mark in marks:
        values = Marked.apply(graphs.cut(values) if graphs else values, mark) * 2
    return values, [weakref.ref(mark) for mark in marks]


@pytest.mark.parametrize("separate", [True, False])
def test_a_graph_is_freed_before_the_backward_pass_of_the_one_before(separate):
    leaf = torch.ones(2, requires_grad=True)
    values, seen = leaf * 1, []
    graphs, mark = SeparateGraphs() if separate else None, Mark()
    values.register_hook(lambda gradient: seen.append([each() is None for each in marks]))
    marks = [weakref.ref(mark)]
    middle = graphs.cut(values) if graphs else values
    middle = Marked.apply(middle, mark) * 2
    del mark
    output = (graphs.cut(middle) if graphs else middle) * 3
    del middle
    output.sum().backward()
    assert seen == [[separate]]
    assert torch.equal(leaf.grad, torch.full((2,), 6.0))


def test_a_pass_that_ends_without_a_backward_pass_leaves_nothing():
    gc.disable()
    try:
        output, marks = graph_of_three(SeparateGraphs())
        assert all(mark() for mark in marks)
        del output
        assert not any(mark() for mark in marks)
    finally:
        gc.enable()


def test_an_error_in_an_earlier_graph_reaches_the_caller_and_leaves_nothing():
    leaf, graphs, mark = torch.ones(2, requires_grad=True), SeparateGraphs(), Mark()
    reference = weakref.ref(mark)
    values = graphs.cut(Marked.apply(leaf, mark))
    del mark
    output = graphs.cut(Refusing.apply(values)) * 2
    del values
    with pytest.raises(MemoryError, match="out of memory"):
        output.sum().backward()
    assert leaf.grad is None
    del output
    gc.collect()
    assert reference() is None
    graphs.cut(leaf * 3).sum().backward()  # the next pass is not disturbed
    assert torch.equal(leaf.grad, torch.full((2,), 3.0))


def test_nothing_is_cut_without_gradients_or_elsewhere():
    values, graphs = torch.ones(2, requires_grad=True), SeparateGraphs()
    with torch.no_grad():
        assert graphs.cut(values) is values
    assert graphs.cut(values.detach()).grad_fn is None
    meta = torch.ones(2, device="meta", requires_grad=True)
    assert graphs.cut(meta) is meta


def test_no_map_lives_longer_than_in_one_graph():
    def step(graphs):
        values = torch.ones(1 << 18, requires_grad=True)
        for _ in range(6):
            values = (graphs.cut(values) if graphs else values).exp()  # keeps its output
        values.backward(torch.ones(()).expand(values.shape))

    whole, cut = (tensor_peak_bytes(lambda graphs=graphs: step(graphs), []) for graphs in (None, SeparateGraphs()))
    assert cut <= whole + 1000
