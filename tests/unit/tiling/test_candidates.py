"""Grids and groups on one device: what they take, and which of them are worth measuring."""

from itertools import pairwise

import pytest
from tiling_samples import residual, yolo

from snugfit.tiling.candidates import candidates_on_one_device, group_boundaries, most_square_grid, subsample


def test_the_squarest_grid_that_fits():
    assert most_square_grid(4, 38, 38) == (2, 2)
    assert most_square_grid(6, 38, 38) == (2, 3)
    assert most_square_grid(6, 20, 80) == (1, 6)
    assert most_square_grid(7, 4, 4) == (2, 3), "seven tiles do not fit a map of four by four, six do"
    assert most_square_grid(5, 1, 1) == (1, 1)


def test_groups_meet_in_front_of_what_reads_more_than_a_pixel():
    layers = yolo()
    assert group_boundaries(layers) == tuple(range(17)) == layers.cuts
    assert set(group_boundaries(residual())) == {0, 1, 5, 6}


def test_no_way_is_beaten_by_another():
    ways = candidates_on_one_device(yolo(), [(1, 1), (2, 2), (4, 4)])
    assert [way.work for way in ways] == sorted(way.work for way in ways)
    assert all(before.bytes > after.bytes for before, after in pairwise(ways))
    assert ways[0].work == pytest.approx(4 / 3), "the least that is computed twice is the forward pass"
    assert ways[-1].bytes < ways[0].bytes / 2


def test_few_ways_are_measured_the_fastest_and_the_leanest_among_them():
    ways = candidates_on_one_device(yolo(), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 6)])
    few = subsample(ways, most=4)
    assert len(few) == 4 and few[0] == ways[0] and few[-1] == ways[-1]
    assert subsample([]) == []


def test_a_grid_finer_than_the_last_map_is_no_way():
    assert candidates_on_one_device(yolo(), [(39, 1)]) == []
