"""The first layer of a group in parts: pixel by pixel; and where that pays."""

from hypothesis import given
from hypothesis import strategies as st
from tiling_samples import layer, yolo

from snugfit._core.hardware import Link, Rank, uniform_cluster
from snugfit.tiling.cost_counter import count_step_cost
from snugfit.tiling.exchange import cells_of
from snugfit.tiling.geometry import Interval, Window, balanced
from snugfit.tiling.grouping import Profile, every_cut
from snugfit.tiling.layers import MapSize, Region, Tiling
from snugfit.tiling.schedule import BackwardRules, Schedule
from snugfit.tiling.splitting import Split, can_split, groups_to_split
from snugfit.tiling.step_cost import Prediction

WINDOWS = st.builds(
    lambda kernel, stride, pad, dilation: Window(kernel, stride, pad, pad, dilation),
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 2),
)  # fmt: skip


@given(WINDOWS, st.integers(1, 20), st.data())
def test_what_is_inside_reads_nothing_else(window, size, data):
    start = data.draw(st.integers(0, size))
    own = Interval(start, data.draw(st.integers(start, size)))
    found = window.inside(own, size)
    for made in range(window.outputs(size)):
        reads = window.needs(Interval(made, made + 1)).clip(size)
        alone = bool(own) and (not reads or reads in own)
        if reads or not own:  # what reads padding alone may be made anywhere
            assert (found.start <= made < found.stop) == alone
        if found.start <= made < found.stop:
            assert reads in own


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), st.integers(1, 3), st.integers(4, 14)
)  # fmt: skip
def test_parts_cover_the_output_once(kernel, stride, padding, down, across, side):
    each, size = layer("conv", (0,), kernel, stride, padding), MapSize(1, side, side)
    outputs = each.rows.outputs(side)
    if outputs < 1:
        return
    for rows in balanced(outputs, down):
        for columns in balanced(outputs, across):
            made = Region(rows, columns)
            core = Region(*(Interval(i.start * stride, min(i.stop * stride, side)) for i in (rows, columns)))
            parts = Split.of(each, made, core, size)
            pieces = [part for part in (parts.inner, *parts.strips) if part.area]
            assert sum(part.area for part in pieces) == made.area and all(part in made for part in pieces)
            assert all(not (a & b).area for a in pieces for b in pieces if a is not b)
            assert (each.needs(parts.inner) & size.whole) in core


def found_at(bytes_per_second, cuts=None):
    layers = yolo()
    tiling = Tiling.of(layers, balanced(38, 1), balanced(38, 2))
    profile = every_cut(layers.cuts) if cuts is None else Profile(cuts)
    network = BackwardRules.of(layers, [each.macs > 0 for each in layers.layers], ["nothing"] * len(layers.layers))
    schedule = Schedule(tiling, profile, profile, network)
    cells = cells_of(tiling.tiles, 1, 2)
    cluster = uniform_cluster(2, Rank(0, "host", 1, 30e9, 0), Link(0, 1, bytes_per_second, 1e-4))
    return schedule, groups_to_split(schedule, cells, Prediction(count_step_cost(schedule, cells, 1), cluster), 1)


def test_it_pays_on_slow_links_alone():
    schedule, slow = found_at(1e6)
    _, fast = found_at(1e12)
    halos = {
        index
        for index, (start, _) in enumerate(schedule.forward.groups)
        if schedule.tiling.layers.layers[start].rows.kernel > 1 and schedule.tiling.layers.layers[start].macs
    }
    assert slow == halos - {0} and fast == frozenset()


def test_the_first_group_waits_for_images():
    schedule, _ = found_at(1e6)
    assert not can_split(schedule, 0) and can_split(schedule, 1)
