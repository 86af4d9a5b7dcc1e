"""What a step is counted to take, against pixels one by one, against exchanges, and against the step itself."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiled_nets import LAYERS, network
from tiling_samples import layer, residual, yolo
from torch.utils.flop_counter import FlopCounterMode

from snugfit.errors import ModelError
from snugfit.tiling.candidates import group_boundaries
from snugfit.tiling.cost_counter import Placement, count_step_cost
from snugfit.tiling.distributed import TiledNetwork
from snugfit.tiling.exchange import Routes, Wanted, cells_of
from snugfit.tiling.geometry import balanced
from snugfit.tiling.grouping import Profile, every_cut, one_group
from snugfit.tiling.layers import Layers, MapSize, Tiling
from snugfit.tiling.plan import schedule_of
from snugfit.tiling.schedule import BackwardRules, Schedule
from snugfit.tiling.tileable_prefix import find_tileable_prefix
from snugfit.tiling.transport import DryRunTransport

PROFILES = st.sampled_from((one_group, every_cut))


def chains():
    """Layers one after another: kernel, stride, padding, channels; windows leave no pixel out."""
    return st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(0, 1), st.integers(1, 3)).filter(
            lambda each: each[0] >= each[1] and each[2] < each[0]
        ),
        min_size=1, max_size=3,
    )  # fmt: skip


def layers_of(plans, height, width):
    made, channels = [], 2
    for number, (kernel, stride, padding, outputs) in enumerate(plans):
        macs = kernel * kernel * channels * outputs
        made.append((layer(f"conv{number}", (number,), kernel, stride, padding, macs, macs), outputs))
        channels = outputs
    return Layers.of(MapSize(2, height, width), made)


def schedule(layers, grid, forward, backward, *, recompute=False):
    last = layers.maps[-1]
    tiling = Tiling.of(layers, balanced(last.height, grid[0]), balanced(last.width, grid[1]))
    reads = ["core" if each.macs else "nothing" for each in layers.layers]
    network_ = BackwardRules.of(layers, [each.macs > 0 for each in layers.layers], reads)
    return Schedule(tiling, forward, backward, network_, recompute)


def read_by(window, made, size):
    """Rows that an output row reads, one by one."""
    rows = (made * window.stride - window.before + tap for tap in range(window.kernel))
    return {row for row in rows if 0 <= row < size}


def pixels(region):
    return {
        (row, column)
        for row in range(region.rows.start, region.rows.stop)
        for column in range(region.columns.start, region.columns.stop)
    }


def inputs_of(layers, number, made):
    """Pixels that a layer reads for pixels that it makes."""
    each, size = layers.layers[number], layers.maps[number]
    return {
        (row, column)
        for y, x in made
        for row in read_by(each.rows, y, size.height)
        for column in read_by(each.columns, x, size.width)
    }


def outputs_of(layers, number, read):
    """Pixels that a layer makes of any of these."""
    made = pixels(layers.maps[number + 1].whole)
    return {pixel for pixel in made if inputs_of(layers, number, {pixel}) & read}


def owner_of(tiling, number, pixel, ranks):
    return next(ranks[tile] for tile in tiling.tiles if pixel in pixels(tiling.core(number, tile)))


class Slow:
    """The same count, pixel after pixel, for one image and a tile per process; layers one after another."""

    def __init__(self, plan):
        self.plan, self.tiling, self.layers = plan, plan.tiling, plan.tiling.layers
        self.ranks = {tile: rank for rank, tile in enumerate(self.tiling.tiles)}
        self.macs, self.sent = Counter(), Counter()

    def fetch(self, number, tile, wanted, kind):
        for pixel in wanted:
            owner = owner_of(self.tiling, number, pixel, self.ranks)
            if owner != self.ranks[tile]:
                self.sent[kind, owner] += self.layers.maps[number].channels

    def back(self, start, stop, tile, first):
        """Gradients of a group, and the pixels of every map that it reads for weights."""
        found, read = {start: pixels(self.tiling.core(start, tile))}, {}
        for number in range(start, stop):
            own = pixels(self.tiling.core(number + 1, tile))
            reached = outputs_of(self.layers, number, found[number]) if number > 0 else set()
            found[number + 1] = box(own | reached)
            read[number] = inputs_of(self.layers, number, own)
            macs, stride = self.layers.layers[number].macs, self.layers.layers[number].strides
            self.macs["backward", self.ranks[tile]] += len(own) * macs
            if number > 0:
                self.macs["backward", self.ranks[tile]] += len(found[number]) * macs // stride
        if not first:
            self.fetch(stop, tile, found[stop], "backward halo")
        return read

    def count(self):
        for tile in self.tiling.tiles:
            read = {}
            for start, stop in self.plan.backward.groups:
                read |= self.back(start, stop, tile, first=stop == self.plan.backward.cuts[-1])
            for start, stop in reversed(self.plan.forward.groups):
                held = pixels(self.tiling.core(stop, tile))
                for number in range(stop - 1, start - 1, -1):
                    self.macs["forward", self.ranks[tile]] += len(held) * self.layers.layers[number].macs
                    held = box(inputs_of(self.layers, number, held) | read[number])
                if start > 0:
                    self.fetch(start, tile, held, "forward halo")
        return self


def box(found):
    """The smallest rectangle that holds these pixels, as pixels."""
    if not found:
        return set()
    rows, columns = zip(*found, strict=True)
    return {(y, x) for y in range(min(rows), max(rows) + 1) for x in range(min(columns), max(columns) + 1)}


@settings(max_examples=40, deadline=None)
@given(chains(), st.integers(7, 12), st.integers(7, 12), st.integers(1, 3), st.integers(1, 2), PROFILES, PROFILES)
def test_the_tally_is_that_of_pixels_one_by_one(plans, height, width, down, across, forward, backward):
    try:
        layers = layers_of(plans, height, width)
    except ModelError:  # a map became too small
        return
    last = layers.maps[-1]
    if down > last.height or across > last.width:
        return
    plan = schedule(layers, (down, across), forward(layers.cuts), backward(layers.cuts))
    slow, fast = Slow(plan).count(), count_step_cost(plan, cells_of(plan.tiling.tiles, 1, down * across), 1)
    for rank in range(down * across):
        for part in ("forward", "backward"):
            assert fast.macs(rank, part) == slow.macs[part, rank]
        for kind in ("forward halo", "backward halo"):
            assert fast.sent(rank, kind) == slow.sent[kind, rank]


def sent(exchange, end, rank):
    """Values of the messages with a process at their beginning (0) or end (1)."""
    found = [each for pair, each in exchange.messages.items() if pair[end] == rank != pair[1 - end]]
    return exchange.channels * sum(transfer.part.pixels for transfers in found for transfer in transfers)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("replicas", "processes"), [(1, 4), (2, 3), (1, 1), (2, 8)])
@pytest.mark.parametrize("profile", [one_group, every_cut])
@pytest.mark.parametrize("rest", ["gateway", "replicated"])
def test_what_is_sent_is_what_exchanges_send(rest, profile, replicas, processes, recompute):
    layers, images = residual(), 3
    plan = schedule(layers, (2, 2), profile(layers.cuts), every_cut(layers.cuts), recompute=recompute)
    cells = cells_of(plan.tiling.tiles, replicas, processes)
    count = count_step_cost(plan, cells, images, Placement(rest=rest), weights=0)
    routes, last, who = (
        Routes(plan, cells, processes),
        len(layers.layers),
        "everyone" if rest == "replicated" else "gateway",
    )
    groups = next(iter(plan.backward_groups.values()))
    exchanges = {"images": [routes.exchange(0, "gateway", Wanted("forward", 0), images)]}
    exchanges["forward halo"] = [
        routes.exchange(start, "cores", Wanted("forward", index), images)
        for index, (start, _) in enumerate(plan.forward.groups) if index
    ]  # fmt: skip
    exchanges["last map"] = [routes.exchange(last, "cores", Wanted(who), images)]
    exchanges["gradient"] = [routes.exchange(last, who, Wanted("backward", 0), images)]
    exchanges["backward halo"] = [
        routes.exchange(group.stop, "cores", Wanted("backward", index), images)
        for index, group in enumerate(groups) if index
    ]  # fmt: skip
    exchanges["recompute halo"] = [
        routes.exchange(group.start, "cores", Wanted("recompute", index), images)
        for index, group in enumerate(groups) if recompute and group.entries
    ]  # fmt: skip
    for rank in range(processes):
        for kind, found in exchanges.items():
            assert count.sent(rank, kind) == sum(sent(each, 0, rank) for each in found)
            assert count.received(rank, kind) == sum(sent(each, 1, rank) for each in found)
        assert count.sent(rank) == sum(sent(each, 0, rank) for found in exchanges.values() for each in found)


@settings(max_examples=25, deadline=None)
@given(
    st.data(), st.lists(LAYERS, max_size=4), st.integers(9, 16), st.booleans(), st.booleans(), st.integers(1, 4),
    PROFILES, PROFILES,
)  # fmt: skip
def test_the_step_computes_and_keeps_what_was_counted(data, plans, size, recompute, training, count, forward, backward):
    """Convolutions run in the counted shapes. Gradients of feature maps are padded and then cropped, which takes more.

    A convolution that shrinks its map runs fewer taps at the border than are counted: no bound is known there.
    """
    module = network(plans).train(training)
    try:
        prefix = find_tileable_prefix(module, (3, size, size))
    except (ModelError, RuntimeError):  # a map became too small
        return
    last, cuts = prefix.layers.maps[-1], prefix.layers.cuts
    tiling = Tiling.of(prefix.layers, balanced(last.height, min(2, last.height)), balanced(last.width, 1))
    plan = schedule_of(prefix, tiling, forward(cuts), backward(cuts), recompute=recompute)
    count = min(count, len(tiling.tiles) * 2)
    cells = cells_of(tiling.tiles, 2, count)
    found, rank = count_step_cost(plan, cells, 3, processes=count), data.draw(st.integers(0, count - 1))
    net = TiledNetwork(prefix, plan, cells, DryRunTransport(rank, count))
    images = torch.ones(3, 3, size, size).to(net.like) if rank == 0 else None
    with FlopCounterMode(display=False) as flops:
        made = net.forward(images, 3)
    assert flops.get_total_flops() == 2 * found.macs(rank, "forward")
    held = [each.values.numel() for maps in net._state.maps.values() for each in maps.values()]
    assert 4 * sum(held) == found.kept_bytes[rank]
    with FlopCounterMode(display=False) as flops:
        net.backward(None if made is None else torch.ones_like(made))
    if all(layer[3] >= layer[4] * (layer[1] - 1) // 2 for layer in plans if layer[0] == "conv"):
        assert flops.get_total_flops() >= 2 * (found.macs(rank, "backward") + found.macs(rank, "recompute"))


def test_weights_by_a_ring_or_by_the_gateway():
    layers = yolo()
    plan = schedule(layers, (2, 2), every_cut(layers.cuts), every_cut(layers.cuts))
    cells, weights = cells_of(plan.tiling.tiles, 1, 4), sum(each.weights for each in layers.layers)
    ring, star = (count_step_cost(plan, cells, 1, Placement(update=update)) for update in ("all-reduce", "gateway"))
    assert weights == 3_418_976 and ring.sent(2, "weights") == -(-2 * 3 * weights // 4)
    assert star.sent(0, "weights") == star.received(0, "weights") == 3 * weights == 3 * star.sent(2, "weights")
    assert ring.total("weights") == star.total("weights")


def test_a_replicated_rest_sends_the_last_map_to_all_and_no_gradient():
    layers, macs = residual(), 1000
    plan = schedule(layers, (2, 2), every_cut(layers.cuts), every_cut(layers.cuts))
    cells, last = cells_of(plan.tiling.tiles, 1, 4), layers.maps[-1]
    gateway, all_ = (
        count_step_cost(plan, cells, 2, Placement(rest=rest), processes=5, rest_macs=macs)
        for rest in ("gateway", "replicated")
    )
    values = 2 * last.channels * last.height * last.width
    assert [all_.received(rank, "last map") for rank in (0, 4)] == [gateway.received(0, "last map"), values]
    assert all_.total("last map") == 4 * values
    assert all_.total("gradient") == 0 < gateway.total("gradient")
    assert [all_.macs(rank) - gateway.macs(rank) for rank in range(5)] == [0, *[3 * 2 * macs] * 4]
    others = ("images", "forward halo", "norms", "backward halo", "weights")
    assert all_.total(*others) == gateway.total(*others)


def test_one_process_sends_nothing_and_the_paper_network_takes_13_gmac():
    layers = yolo()
    plan = schedule(layers, (1, 1), one_group(layers.cuts), one_group(layers.cuts))
    found = count_step_cost(plan, cells_of(plan.tiling.tiles, 1, 1), 2)
    assert (found.synchronisations, found.total()) == (0, 0)
    forward = sum(
        each.macs * size.height * size.width for each, size in zip(layers.layers, layers.maps[1:], strict=True)
    )
    assert forward == pytest.approx(13.0e9, rel=0.001) and found.macs(0, "forward") == 2 * forward
    first = layers.layers[0].macs * 608 * 608
    assert found.macs(0, "backward") == 2 * (2 * forward - first)  # the image needs no gradient


def test_a_process_without_a_tile_waits():
    layers = residual()
    plan = schedule(layers, (1, 2), every_cut(layers.cuts), Profile((0, len(layers.layers))))
    found = count_step_cost(plan, cells_of(plan.tiling.tiles, 1, 2), 1, processes=3)
    assert found.tiles == (1, 1, 0) and found.macs(2) == 0 == found.kept_bytes[2]


def test_backward_groups_that_meet_behind_convolutions_keep_less():
    """In front of them norms and activations run on the halo, and their maps are kept with it."""
    module = network([("norm", True), ("activation", 2), ("conv", 3, 1, 1, 1, 1, False), ("norm", True)]).train()
    prefix = find_tileable_prefix(module, (3, 16, 16))
    forward, beside, apart = (
        every_cut(group_boundaries(prefix.layers, direction, apart=each))
        for direction, each in (("forward", False), ("backward", False), ("backward", True))
    )
    assert [str(each) for each in (forward, beside, apart)] == [
        "0-1 | 1-3 | 3-4 | 4-5", "0-2 | 2-3 | 3-5", "0-1 | 1-2 | 2-3 | 3-4 | 4-5"
    ]  # fmt: skip
    tiling = Tiling.of(prefix.layers, balanced(16, 2), balanced(16, 2))
    cells = cells_of(tiling.tiles, 1, 4)
    more, less = (count_step_cost(schedule_of(prefix, tiling, forward, each), cells, 1) for each in (beside, apart))
    assert less.kept_bytes[0] < more.kept_bytes[0] and less.macs(0) <= more.macs(0)


def test_groups_do_not_meet_where_nothing_is_fetched():
    """Norms with frozen statistics, activations and pools without overlap need no halo; a recomputing plan stays."""
    module = network([("norm", True), ("activation", 2), ("conv", 3, 1, 1, 1, 1, False), ("norm", True)]).eval()
    prefix = find_tileable_prefix(module, (3, 16, 16))
    tiling, cuts = Tiling.of(prefix.layers, balanced(16, 2), balanced(16, 2)), prefix.layers.cuts
    every = every_cut(cuts)
    found = schedule_of(prefix, tiling, every, every)
    kept = schedule_of(prefix, tiling, every, every, recompute=True)
    cells = cells_of(tiling.tiles, 1, 4)
    assert (str(found.forward), str(found.backward)) == ("0-3 | 3-5", "0-4 | 4-5")
    assert kept.backward == every
    plain = Schedule(tiling, every, every, found.network)
    counts = [count_step_cost(each, cells, 1) for each in (found, plain)]
    for rank in range(4):
        assert counts[0].macs(rank) == counts[1].macs(rank) and counts[0].sent(rank) == counts[1].sent(rank)
    assert counts[0].kept_bytes == counts[1].kept_bytes
