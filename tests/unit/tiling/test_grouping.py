"""Profiles as text; the cost of groups against the paper's example; the cheapest profile against all of them."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiling_samples import figure_4_4, residual, square, yolo

from snugfit.errors import UsageError
from snugfit.tiling.geometry import balanced, weighted
from snugfit.tiling.grouping import CostModel, Prices, Profile, Work, cheapest, every_cut, group_work, one_group
from snugfit.tiling.layers import Tiling


def every_profile(cuts):
    inner = cuts[1:-1]
    for count in range(len(inner) + 1):
        for chosen in combinations(inner, count):
            yield Profile((cuts[0], *chosen, cuts[-1]))


def example(mac):
    """Cost of the groups of section 5.2's example on a tile with eight neighbours."""
    layers, cores = figure_4_4(), [square(8, 16), square(4, 8), square(4, 8), square(2, 4)]

    def cost(start, stop):
        work = group_work(layers, start, stop, cores[start], "backward", own=cores[stop], clip=False)
        return Prices(mac, 2.0).of(work)

    return layers.cuts, cost


def test_section_5_2_with_cheap_computation():
    cuts, cost = example(0.1)
    assert cost(0, 3) == pytest.approx(60.90)
    assert cheapest(cuts, cost) == one_group(cuts)


def test_section_5_2_with_dear_computation():
    """Halos of l+3 and l+1 are exchanged then."""
    cuts, cost = example(0.5)
    assert str(cheapest(cuts, cost)) == "0-1 | 1-3"


def centre(direction):
    """Work of the tile in the middle of 3x3 on YOLOv2 between any two cuts."""
    layers = yolo()
    tiling = Tiling.of(layers, balanced(38, 3), balanced(38, 3))

    def work(start, stop):
        made, exchanged = (stop, start) if direction == "forward" else (start, stop)
        core, own = tiling.core(made, (1, 1)), tiling.core(exchanged, (1, 1))
        return group_work(layers, start, stop, core, direction, own=own)

    return layers.cuts, work


def summed(work, profile):
    found = [work(start, stop) for start, stop in profile.groups]
    return Work(sum(each.macs for each in found), sum(each.elements for each in found))


def test_yolo_forward_sends_least_with_five_groups():
    """As the paper found (section 5.3); each but the first begins where few channels are read by a 3x3 kernel."""
    cuts, work = centre("forward")
    best = cheapest(cuts, lambda start, stop: work(start, stop).elements)
    assert str(best) == "0-8 | 8-10 | 10-12 | 12-14 | 14-16"
    one, all_cuts = summed(work, one_group(cuts)), summed(work, every_cut(cuts))
    assert summed(work, best).elements < all_cuts.elements < one.elements
    assert all_cuts.macs < summed(work, best).macs < one.macs


def test_yolo_backward_sends_less_in_one_group_than_in_sixteen():
    cuts, work = centre("backward")
    one, all_cuts = summed(work, one_group(cuts)), summed(work, every_cut(cuts))
    assert one.elements < all_cuts.elements and one.macs > all_cuts.macs


@given(st.data(), st.integers(2, 8))
def test_cheapest_of_all_profiles(data, count):
    cuts = tuple(range(count))
    pairs = list(combinations(cuts, 2))
    costs = {pair: data.draw(st.integers(0, 20)) for pair in pairs}
    totals = {profile: sum(costs[group] for group in profile.groups) for profile in every_profile(cuts)}
    found = cheapest(cuts, lambda *pair: costs[pair])
    assert totals[found] == min(totals.values())
    assert len(found.groups) == min(len(p.groups) for p in totals if totals[p] == totals[found])


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_single_tile_sends_nothing_and_computes_the_layers_once(direction):
    layers = residual()
    last = layers.maps[-1]
    model = CostModel(Tiling.of(layers, balanced(last.height, 1), balanced(last.width, 1)), [Prices(1.0, 1.0)])
    once = sum(each.macs * size.height * size.width for each, size in zip(layers.layers, layers.maps[1:], strict=True))
    for profile in every_profile(layers.cuts):
        work = [model.work(start, stop, direction)[0] for start, stop in profile.groups]
        assert sum(each.elements for each in work) == 0
        if direction == "forward":
            assert sum(each.macs for each in work) == once


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_smaller_groups_compute_less(direction):
    layers = residual()
    model = CostModel(Tiling.of(layers, balanced(7, 2), balanced(9, 3)), [Prices(1.0, 0.0)])
    assert model.total(every_cut(layers.cuts), direction) <= model.total(one_group(layers.cuts), direction)
    assert model.cheapest(direction) == min(
        every_profile(layers.cuts), key=lambda p: (model.total(p, direction), len(p.groups))
    )


def test_a_group_takes_as_long_as_its_slowest_tile():
    layers = figure_4_4()
    even = Tiling.of(layers, balanced(4, 2), balanced(4, 1))
    fast, slow = Prices(1.0, 0.0), Prices(3.0, 0.0)
    assert CostModel(even, [fast, slow]).group(0, 3, "forward") == 3 * CostModel(even, [fast]).group(0, 3, "forward")
    fitted = Tiling.of(layers, weighted(4, (3, 1)), balanced(4, 1))
    assert CostModel(fitted, [fast, slow]).group(0, 1, "forward") < CostModel(even, [fast, slow]).group(0, 1, "forward")


def test_batches_and_synchronisation():
    tiling = Tiling.of(figure_4_4(), balanced(4, 2), balanced(4, 2))
    once, eight = (CostModel(tiling, [Prices(1.0, 1.0, 100.0)], batch) for batch in (1, 8))
    assert eight.group(0, 2, "backward") - 100 == 8 * (once.group(0, 2, "backward") - 100)


def test_profiles_print_and_parse_back():
    for profile in every_profile((0, 1, 2, 5, 6)):
        assert Profile.parse(str(profile), (0, 1, 2, 5, 6)) == profile
    assert str(Profile((0, 4, 11, 16))) == "0-4 | 4-11 | 11-16"


@pytest.mark.parametrize(
    "text", ["", "0-4 4-6", "0-4 | 5-6", "0-4 | 3-6", "a-b", "0-2 | 2-3 | 3-6", "1-6", "0-5", "6-0"]
)
def test_what_is_no_profile(text):
    with pytest.raises(UsageError):
        Profile.parse(text, (0, 1, 2, 5, 6))


def test_the_gateway_sends_one_tile_after_another():
    """Of the images, and of the gradient of the last map, what the tiles of others need; its own is there."""
    layers = yolo()
    tiling = Tiling.of(layers, balanced(38, 2), balanced(38, 2))
    plain = CostModel(tiling, [Prices(0.0, 1.0)])
    first, last = (CostModel(tiling, [Prices(0.0, 1.0)], owners=each) for each in ((0, 1, 2, 3), (0, 0, 0, 0)))
    stop = len(layers.layers)
    assert first.group(0, 1, "forward") == 3 * 3 * 305 * 305 and last.group(0, 1, "forward") == 0
    assert first.group(stop - 1, stop, "backward") == 3 * 256 * 19 * 19
    for start, end in ((1, 4), (4, stop - 1)):
        assert first.group(start, end, "forward") == plain.group(start, end, "forward")


def test_tiles_of_one_process_share_its_price():
    """A price tells how many tiles its process runs one after another; the gateway sends each of them once."""
    layers = yolo()
    tiling = Tiling.of(layers, balanced(38, 2), balanced(38, 2))
    apart = CostModel(tiling, [Prices(0.0, 1.0)] * 4, owners=(0, 1, 2, 3)).group(0, 1, "forward")
    pairs = CostModel(tiling, [Prices(0.0, 2.0)] * 4, owners=(0, 0, 1, 1)).group(0, 1, "forward")
    assert pairs == apart * 2 / 3
