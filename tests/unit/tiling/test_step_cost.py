"""Seconds of a measured cluster: prices of tiles, and a step's time against sums by hand."""

import pytest
from tiling_samples import figure_4_4, yolo

from snugfit._core.hardware import Cluster, Link, Rank, uniform_cluster
from snugfit.errors import UsageError
from snugfit.tiling.cost_counter import all_gathered, all_reduced, all_to_all
from snugfit.tiling.geometry import balanced
from snugfit.tiling.grouping import CostModel, Prices, group_work, prices_of
from snugfit.tiling.layers import Tiling, shares_by_speed, tiling_of
from snugfit.tiling.step_cost import Prediction, Stage, StepCost


def rank(number, host, speed):
    return Rank(number, host, 1, speed, 10**9)


def cluster(hosts=("a", "b", "b"), speeds=(100.0, 50.0, 200.0)):
    """The second host's processes reach each other fast."""
    links = [
        Link(s, t, 4000.0 if hosts[s] == hosts[t] else 400.0, 0.001 if hosts[s] == hosts[t] else 0.01)
        for s in range(len(hosts)) for t in range(len(hosts)) if s != t
    ]  # fmt: skip
    return Cluster(tuple(rank(i, *each) for i, each in enumerate(zip(hosts, speeds, strict=True))), tuple(links))


def test_prices_of_tiles():
    first, second, third, fourth = prices_of(cluster(), [0, 1, 2, 2])
    assert (first.mac, second.mac, third.mac) == (1 / 100, 1 / 50, 2 / 200)
    assert first.element == second.element == 4 * 2 / 400  # the two of host b share its way out
    assert third == fourth and third.element == 2 * 4 * 2 / 400
    assert first.sync == 0.01
    assert prices_of(cluster(), [1, 1]) == [Prices(2 / 50, 0.0, 0.0)] * 2
    assert prices_of(cluster(), [1, 2])[0] == Prices(1 / 50, 4 / 4000, 0.001)


def test_a_missing_link_is_named():
    lonely = Cluster(cluster().ranks)
    with pytest.raises(UsageError, match="from rank 0 to rank 1"):
        prices_of(lonely, [0, 1])
    with pytest.raises(UsageError, match="from rank 0 to rank 2"):
        _ = Prediction(
            StepCost((Stage("weights", "backward", {(0, 2): 5}, (0, 0, 0)),), (0,) * 3, (1,) * 3), lonely
        ).spans


def test_a_step_takes_what_its_stages_take():
    images = Stage("images", "forward", {(0, 1): 100, (0, 2): 100}, (1000, 1000, 1000))
    halo = Stage("backward halo", "backward", {(1, 2): 100, (2, 1): 100, (1, 0): 0}, (0, 0, 100))
    found = Prediction(StepCost((images, halo), (0,) * 3, (1,) * 3), cluster())
    assert found.spans[0].sending == pytest.approx(2 * 400 / 400 + 0.01) and found.spans[0].computing == 20.0
    assert found.spans[1].sending == pytest.approx(400 / 4000 + 0.001) and found.spans[1].computing == 0.5
    assert found.seconds == pytest.approx(2.01 + 20 + 0.101 + 0.5)
    assert found.part("forward") == pytest.approx(22.01) and found.part("recompute") == 0
    assert found.sending("backward halo") == pytest.approx(0.101)


def test_rings():
    assert all_reduced(300, 1) == {} == all_gathered(0, 3)
    assert all_reduced(300, 3) == {(0, 1): 400, (1, 2): 400, (2, 0): 400}
    assert all_gathered(300, 3) == {(0, 1): 600, (1, 2): 600, (2, 0): 600}
    assert all_to_all(7, 2) == {(0, 1): 7, (1, 0): 7} and all_to_all(0, 2) == {} == all_to_all(7, 1)
    weights = Stage("weights", "backward", all_reduced(300, 3), (0, 0, 0), rounds=4)
    found = Prediction(StepCost((weights,), (0,) * 3, (1,) * 3), cluster())
    assert found.seconds == pytest.approx(4 * 400 / 400 + 4 * 0.01)
    assert found.part("backward") == 0  # weights are told apart


def test_tiles_by_the_speed_of_their_devices():
    shares = shares_by_speed((2, 2), (3.0, 3.0, 1.0, 1.0))
    found = tiling_of(figure_4_4(), (2, 2), shares)
    assert [len(each) for each in found.rows[-1]] == [3, 1] and [len(each) for each in found.columns[-1]] == [2, 2]
    layers, speeds = yolo(), (1.0, 2.0)
    prices = [Prices(1 / speed, 0.0) for speed in speeds]
    even = CostModel(tiling_of(layers, (1, 2)), prices)
    fitted = CostModel(tiling_of(layers, (1, 2), shares_by_speed((1, 2), speeds)), prices)
    assert fitted.group(0, 1, "forward") < 0.7 * even.group(0, 1, "forward")


def test_a_group_without_a_halo_is_no_synchronisation():
    layers = yolo()
    tiling = Tiling.of(layers, balanced(38, 3), balanced(38, 3))

    def work(start, stop):
        return group_work(layers, start, stop, tiling.core(stop, (1, 1)), "forward", own=tiling.core(start, (1, 1)))

    assert work(1, 2).syncs == work(5, 6).syncs == 0  # a pool, and a convolution of 1x1
    assert work(0, 1).syncs == work(4, 6).syncs == 1


def test_clusters_that_are_not_at_hand():
    found = uniform_cluster(3, rank(0, "pi", 5.0), Link(0, 1, 10.0, 0.5))
    assert [each.host for each in found.ranks] == ["pi-0", "pi-1", "pi-2"] and found.size == 3
    assert found.link(2, 0) == Link(2, 0, 10.0, 0.5) and len(found.links) == 6
