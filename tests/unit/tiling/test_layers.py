"""Regions over several layers, against following every single pixel; cuts; tiles that cover every map once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiling_samples import figure_4_4, layer, residual, square, yolo

from snugfit.errors import ModelError
from snugfit.tiling.geometry import Interval, Window, balanced
from snugfit.tiling.layers import Layers, MapSize, Region, Tiling


def pixels(region):
    return {(row, column) for row in interval(region.rows) for column in interval(region.columns)}


def interval(rows):
    return range(rows.start, rows.stop)


def hull_of(found):
    rows, columns = [row for row, _ in found], [column for _, column in found]
    return Region(Interval(min(rows), max(rows) + 1), Interval(min(columns), max(columns) + 1))


def reads(window, output):
    return [output * window.stride - window.before + window.dilation * tap for tap in range(window.kernel)]


def sources(layers, number, pixel):
    """Every pixel, as map and place, that a layer reads for one pixel of its output."""
    each = layers.layers[number]
    for read in each.reads:
        size = layers.maps[read]
        for row in reads(each.rows, pixel[0]):
            for column in reads(each.columns, pixel[1]):
                if 0 <= row < size.height and 0 <= column < size.width:
                    yield read, (row, column)


def needed_one_by_one(layers, start, stop, output):
    found = {stop: pixels(output)}
    for number in range(stop - 1, start - 1, -1):
        for pixel in found.get(number + 1, ()):
            for read, place in sources(layers, number, pixel):
                found.setdefault(read, set()).add(place)
    return found


def reached_one_by_one(layers, start, stop, read):
    found = {start: pixels(read)}
    for number in range(start, stop):
        whole = layers.maps[number + 1].whole
        for pixel in pixels(whole):
            if any(place in found.get(source, ()) for source, place in sources(layers, number, pixel)):
                found.setdefault(number + 1, set()).add(pixel)
    return found


def parts_of(size):
    return st.integers(0, size - 1).flatmap(
        lambda start: st.integers(start + 1, size).map(lambda stop: Interval(start, stop))
    )


@given(st.data(), st.sampled_from([residual(), figure_4_4()]))
def test_what_a_part_of_the_last_map_needs(data, layers):
    """Every pixel that is needed lies in the region; between its first and last one nothing is left out."""
    start, stop = sorted(data.draw(st.lists(st.sampled_from(layers.cuts), min_size=2, max_size=2, unique=True)))
    size = layers.maps[stop]
    output = Region(data.draw(parts_of(size.height)), data.draw(parts_of(size.width)))
    regions, slow = layers.needed(start, stop, {stop: output}), needed_one_by_one(layers, start, stop, output)
    assert regions.keys() == slow.keys()
    for number, found in slow.items():
        assert hull_of(found) in regions[number]
        if all(len(each.reads) == 1 and each.rows.dilation == 1 for each in layers.layers[start:stop]):
            assert hull_of(found) == regions[number]


@given(st.data(), st.sampled_from([residual(), figure_4_4()]))
def test_what_a_part_of_the_first_map_reaches(data, layers):
    start, stop = sorted(data.draw(st.lists(st.sampled_from(layers.cuts), min_size=2, max_size=2, unique=True)))
    size = layers.maps[start]
    read = Region(data.draw(parts_of(size.height)), data.draw(parts_of(size.width)))
    regions, slow = layers.reached(start, stop, read), reached_one_by_one(layers, start, stop, read)
    for number in range(start, stop + 1):
        found = slow.get(number)
        assert not found or hull_of(found) in regions[number]


def test_figure_4_4():
    layers = figure_4_4()
    found = layers.needed(0, 3, {3: square(0, 2)})  # (a): the upper left tile of the 4x4 output
    assert [found[number] for number in range(3)] == [square(0, 10), square(0, 5), square(0, 4)]
    found = layers.reached(0, 3, square(8, 16), clip=False)  # (b): the lower right tile of the 16x16 delta map
    assert [found[number] for number in (1, 2, 3)] == [square(4, 9), square(3, 10), square(1, 5)]


def test_groups_begin_where_nothing_else_crosses():
    assert residual().cuts == (0, 1, 5, 6)
    assert [residual().alive(number) for number in range(7)] == [(0,), (1,), (1, 2), (1, 3), (3, 4), (5,), (6,)]
    assert yolo().cuts == tuple(range(17))


def test_yolo_is_that_of_the_paper():
    layers = yolo()
    macs = sum(each.macs * size.height * size.width for each, size in zip(layers.layers, layers.maps[1:], strict=True))
    assert sum(each.weights for each in layers.layers) == 3_418_976
    assert macs == pytest.approx(13.00e9, rel=1e-3)
    assert sum(size.elements for size in layers.maps) == pytest.approx(37.7e6, rel=1e-2)


@given(st.sampled_from([residual(), figure_4_4(), yolo()]), st.integers(1, 5), st.integers(1, 5))
def test_tiles_cover_every_map_once(layers, down, across):
    last = layers.maps[-1]
    tiling = Tiling.of(layers, balanced(last.height, down), balanced(last.width, across))
    assert tiling.grid == (down, across) and len(tiling.tiles) == down * across
    for cut in range(len(layers.maps)):
        whole = layers.maps[cut].whole
        assert sum(tiling.core(cut, tile).area for tile in tiling.tiles) == whole.area
        assert all(tiling.core(cut, tile) in whole for tile in tiling.tiles)
        rows = [tiling.core(cut, (row, 0)).rows for row in range(down)]
        assert [row for part in rows for row in interval(part)] == list(range(layers.maps[cut].height))


def test_cuts_move_by_the_strides():
    tiling = Tiling.of(figure_4_4(), balanced(4, 2), balanced(4, 2))
    assert [tiling.core(cut, (1, 1)) for cut in range(4)] == [square(8, 16), square(4, 8), square(4, 8), square(2, 4)]


def test_regions():
    assert square(2, 5) & square(4, 9) == square(4, 5)
    assert square(2, 5).hull(square(7, 9)) == square(2, 9)
    assert square(2, 5).hull(square(3, 3)) == square(3, 3).hull(square(2, 5)) == square(2, 5)
    assert square(2, 3) in square(0, 5) and square(9, 9) in square(0, 5) and square(4, 6) not in square(0, 5)
    assert "something else" not in square(0, 5)


def test_maps_too_small_and_sizes_that_differ():
    with pytest.raises(ModelError, match="too small for layer pool"):
        Layers.of(MapSize(1, 1, 8), [(layer("pool", (0,), 2, 2), 1)])
    halved = (layer("half", (0,), 2, 2), 1)
    with pytest.raises(ModelError, match="layer add cannot make"):
        Layers.of(MapSize(1, 8, 8), [halved, (layer("add", (1, 0)), 1)])
    assert Window(3, 1, 1, 1).outputs(8) == 8
