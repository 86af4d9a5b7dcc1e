"""Strategy ``tiled`` over a cluster that was measured: what it is cut into, what the network adds, what is refused."""

import json
from dataclasses import replace

import pytest
from strategy_samples import HARDWARE, line, profile, workload
from torch import nn

from snugfit._chain import Chain
from snugfit._core.hardware import Cluster, Link, Rank
from snugfit.errors import UnknownNameError, UsageError
from snugfit.strategies.tiled.candidates import chosen_plan, find_plans, probe_name, settings_of_probe
from snugfit.strategies.tiled.network_overhead import NetworkOverhead
from snugfit.strategies.tiled.strategy import Tiled


def network():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return Chain.from_module(nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 32 * 32, 10)), (3, 32, 32))


def cluster(speeds=(1e9, 1e9), latency=1e-3, bandwidth=1e7):
    ranks = tuple(Rank(number, f"host{number}", 1, speed, 10**9) for number, speed in enumerate(speeds))
    pairs = [(s, t) for s in range(len(speeds)) for t in range(len(speeds)) if s != t]
    return Cluster(ranks, tuple(Link(*pair, bandwidth, latency) for pair in pairs))


@pytest.fixture
def measured(tmp_path):
    def write(**settings):
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(cluster(**settings).to_json()))
        return str(path)

    return write


def plan_of(**settings):
    found = find_plans(network(), Tiled(processes=2, recompute="off"), cluster(**settings))
    return next(iter(found.values()))


def test_slow_links_and_dear_waiting_change_the_groups():
    assert plan_of(latency=10.0).forward == "0-5"  # waiting is what costs: one exchange only
    assert plan_of(latency=0.0, bandwidth=1e12).forward.count("|") >= 1  # computing is: nothing twice


def test_names_of_probes_say_all_that_was_chosen():
    strategy = Tiled(processes=2, tile_sizes="speed", cluster="measured.json", recompute="on")
    ((key, plan),) = find_plans(network(), strategy, cluster(speeds=(3e9, 1e9))).items()
    filled = replace(strategy, **settings_of_probe(key))
    assert chosen_plan(filled) == plan and probe_name(plan, filled.network) == key
    assert plan.shares in (((4e9,), (3e9, 1e9)), ((3e9, 1e9), (4e9,)))
    assert str(NetworkOverhead.parse(filled.network)) == filled.network


def test_what_the_network_adds_is_part_of_the_estimate(measured):
    strategy = Tiled(processes=2, cluster=measured(bandwidth=1e6), recompute="off", micro_batch=8, micro_batches=2)
    key = strategy.probes(workload(), network(), HARDWARE)[0].name
    filled, lines = replace(strategy, **settings_of_probe(key)), {f"{key}:accumulate": line(1e6, 1e5)}
    cost = filled.estimate(workload(), profile(lines), HARDWARE)
    added = NetworkOverhead.parse(filled.network)
    assert added.update_seconds > 0 and added.image_seconds > 0 and added.step_seconds > 0
    own = replace(filled, network="")
    bare = own.estimate(workload(), profile({probe_name(chosen_plan(own)) + ":accumulate": line(1e6, 1e5)}), HARDWARE)
    steps = 1000 // 16
    epoch = steps * (2 * added.step_seconds + added.update_seconds) + (steps * 16 + 0.3 * 200) * added.image_seconds
    assert cost.seconds_per_epoch == pytest.approx(bare.seconds_per_epoch + epoch)
    assert cost.seconds == pytest.approx(3 * cost.seconds_per_epoch) and cost.sent_bytes > 0 == bare.sent_bytes
    assert cost.peak_bytes == bare.peak_bytes


def test_twice_the_bandwidth_is_half_the_seconds_of_large_messages():
    slow, fast = (
        NetworkOverhead.parse(
            next(iter(find_plans(network(), Tiled(processes=2), cluster(bandwidth=each)))).split(":")[-1]
        )
        for each in (1e4, 2e4)
    )
    assert slow.image_bytes == fast.image_bytes
    assert slow.image_seconds == pytest.approx(2 * fast.image_seconds, rel=0.05)
    assert slow.update_seconds == pytest.approx(2 * fast.update_seconds, rel=0.05)


def test_a_slow_device_is_waited_for():
    even, uneven = (
        NetworkOverhead.parse(next(iter(find_plans(network(), Tiled(processes=2), cluster(each)))).split(":")[-1])
        for each in ((1e6, 1e6), (1e6, 1e5))
    )
    assert uneven.image_seconds > even.image_seconds + 1


def test_a_replicated_rest_trades_the_gradient_of_the_last_map_for_copies_of_it():
    """Two processes, a map of 8x32x32 floats and a linear layer behind it, which the slower device takes longer for."""
    found = {
        (rest, speeds): NetworkOverhead.parse(
            next(iter(find_plans(network(), Tiled(processes=2, rest=rest), cluster(speeds)))).split(":")[-1]
        )
        for rest in ("gateway", "replicated")
        for speeds in ((1e9, 1e9), (1e9, 1e6))
    }  # fmt: skip
    gateway, everywhere = (found[rest, (1e9, 1e9)] for rest in ("gateway", "replicated"))
    half = 8 * 32 * 32 // 2 * 4
    assert gateway.image_bytes - everywhere.image_bytes == pytest.approx(0, abs=2 * 8 * 32 * 4)  # but for a halo
    assert gateway.image_bytes > 2 * half and gateway.update_bytes == everywhere.update_bytes
    slow, slower = (found[rest, (1e9, 1e6)] for rest in ("gateway", "replicated"))
    linear = 3 * 8 * 32 * 32 * 10
    assert slower.image_seconds - slow.image_seconds == pytest.approx(linear / 1e6, rel=0.02)


def test_another_number_of_processes(measured):
    with pytest.raises(UsageError, match="describes 2 processes, but there are 4 here"):
        Tiled(processes=4, cluster=measured()).validate(workload(), network(), HARDWARE)
    with pytest.raises(UsageError, match=r"cannot read .*: .*doctor --out"):
        Tiled(processes=2, cluster="nowhere.json").validate(workload(), network(), HARDWARE)


def test_sizes_by_speed_need_speeds():
    with pytest.raises(UsageError, match="add --cluster"):
        Tiled(processes=2, tile_sizes="speed")
    with pytest.raises(UnknownNameError):
        Tiled(processes=2, tile_sizes="sped")
