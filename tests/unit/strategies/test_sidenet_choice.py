"""Which configuration is chosen for a budget: the one with the least expected loss, from synthetic lines."""

from collections import Counter

import pytest
from strategy_samples import HARDWARE, MB, line, profile, workload

from snugfit._core.budget import Budget
from snugfit._core.request import StrategyOptions
from snugfit.profiling import Probe
from snugfit.profiling.probe import PROBE_GROWTH
from snugfit.strategies.blockwise.strategy import Blockwise
from snugfit.strategies.memory_estimates import RESERVED_BYTES, SAFETY, TENSOR_TO_PROCESS
from snugfit.strategies.micro_batch import line_name
from snugfit.strategies.sidenet.configurations import (
    FEW_IMAGES,
    INT8,
    NARROW,
    PRUNED,
    Configuration,
    LowerBounds,
)
from snugfit.strategies.sidenet.retraining import RETRAIN
from snugfit.strategies.sidenet.strategy import LEFT_BY_RETRAINING, Sidenet


def budget_for(step_bytes):
    return Budget(int(step_bytes * (1 + SAFETY.share)) + SAFETY.bytes + RESERVED_BYTES + 10)


def lines_of(sizes):
    """Lines by probe: fixed and per-image megabytes; held gradients add one. Retraining takes 2 MB and 1 per image."""
    found = {RETRAIN: line(2 * MB, MB, seconds=0.1)}
    for configuration, (fixed, sample) in sizes.items():
        found[configuration.probe] = line(fixed * MB, sample * MB)
        found[line_name(configuration.probe, hold=True)] = line((fixed + 1) * MB, sample * MB)
    return found


def proposed(strategy, sizes, budget, batch=8):
    found = list(strategy.propose(workload(batch_size=batch), profile(lines_of(sizes)), HARDWARE, budget))
    return found[0] if found else None


def test_everything_fits_without_a_budget():
    made = proposed(Sidenet(), {Configuration(1.0): (10, 1)}, Budget())
    assert made == Sidenet(side_width=1.0, prune="off", sample_wise="off", weight_storage="float32", micro_batch=8)
    assert made.candidates == (Configuration(1.0),) and made.configuration == Configuration(1.0)


def test_configurations_in_the_order_of_what_they_lose():
    found = Sidenet().candidates
    assert found[0] == Configuration(1.0) and found[1] == Configuration(1.0, by_sample=True)
    losses = [each.loss for each in found]
    assert losses == sorted(losses) and len(set(found)) == len(found) == 24
    assert {each.side_width for each in Sidenet(scheme="head").candidates} == {0.0}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"prune": "0.5"}, {"pruned": {True}}),
        ({"prune": "off"}, {"pruned": {False}}),
        ({"sample_wise": "on"}, {"by_sample": {True}}),
        ({"weight_storage": "int8"}, {"int8": {True}}),
        ({"weight_storage": "float32"}, {"int8": {False}}),
        ({"side_width": 2.0}, {"side_width": {2.0}}),
    ],
)
def test_a_set_option_leaves_one_value(options, wanted):
    for name, values in wanted.items():
        assert {getattr(each, name) for each in Sidenet(**options).candidates} == values


def test_losses_by_hand():
    assert Configuration(1.0).loss == 0 and Configuration(1.0, by_sample=True).loss == 0
    assert Configuration(0.25, pruned=True, int8=True).loss == pytest.approx(2 * NARROW + PRUNED + INT8)
    assert Configuration(2.0).loss == 0, "a wider side network loses nothing"
    assert Configuration(1.0).loss_at(8, 128) == 0 and Configuration(1.0).loss_at(32, 128) == 0
    assert Configuration(1.0).loss_at(4, 128) == pytest.approx(FEW_IMAGES)
    assert Configuration(1.0).loss_at(1, 8) == pytest.approx(9 * FEW_IMAGES)
    assert Configuration(1.0).loss_at(2, 2) == 0, "the batch that was asked for loses nothing"
    assert Configuration(0.0).loss_at(1, 8) == 0, "no BatchNorm sees the batch"


PLAIN, SAMPLES = Configuration(1.0), Configuration(1.0, by_sample=True)
CODED, CUT = Configuration(1.0, int8=True), Configuration(1.0, pruned=True)
NARROWER = Configuration(0.5)
SIZES = {PLAIN: (20, 5), SAMPLES: (24, 3), CODED: (14.8, 5), CUT: (10, 2), NARROWER: (18, 1)}


@pytest.mark.parametrize(
    ("headroom", "taken", "micro_batch"),
    [
        (60.1, PLAIN, 8),  # 20 + 8 x 5
        (48.1, SAMPLES, 8),  # 24 + 8 x 3; the plain one would run at 4
        (41.1, PLAIN, 4),  # 21 + 4 x 5, and few images lose less than int8 at 4
        (33.1, CODED, 3),  # 15.8 + 3 x 5; image by image at 2
        (30.5, CUT, 8),  # 10 + 8 x 2 and 4 left by retraining; int8 at 2, which loses more
    ],
)
def test_exact_configurations_come_first(headroom, taken, micro_batch):
    sizes = {each: size for each, size in SIZES.items() if each != NARROWER}
    made = proposed(Sidenet(), sizes, budget_for(headroom * MB))
    assert (made.configuration, made.micro_batch) == (taken, micro_batch)
    assert made.micro_batches == -(-8 // made.micro_batch)


def test_the_narrower_side_network_is_the_last_resort():
    sizes = {PLAIN: (40, 5), CUT: (36, 2), NARROWER: (18, 1)}
    assert proposed(Sidenet(), sizes, budget_for(30 * MB)).side_width == 0.5
    assert proposed(Sidenet(), sizes, budget_for(5 * MB)) is None


def test_without_accumulation_the_batch_is_lowered():
    made = proposed(Sidenet(accumulate=False), {PLAIN: (20, 5)}, budget_for(46 * MB))
    assert (made.micro_batch, made.micro_batches) == (5, 1)


def lower_bounds(floors, retraining=10 * MB, applies=lambda _: True):
    """Bounds of synthetic variants: megabytes of the fewest images, and of the whole batch, by configuration."""
    asked = []

    def probe(name, few, whole):
        def floor(batch):
            asked.append((name, batch))
            return int((whole if batch == 8 else few) * MB / TENSOR_TO_PROCESS) + 1

        return Probe(name, lambda: None, floor, 8, network="sidenet")

    variants = {
        (each, hold): probe(line_name(each.probe, hold=hold), *found)
        for each, found in floors.items()
        for hold in (False, True)
    }
    return LowerBounds(variants, probe(RETRAIN, retraining / MB, 0), applies), asked


def test_a_variant_is_measured_only_where_it_may_lose_less():
    strategy, work = Sidenet(), workload(batch_size=8)
    lines = lines_of({PLAIN: (20, 5)})
    infinite, tight = float("inf"), 52 * MB + SAFETY.bytes + RESERVED_BYTES
    floors = dict.fromkeys((PLAIN, SAMPLES, CODED, CUT), (20, 30))

    def needed(configuration, known, available, applies=lambda _: True, hold=False):
        found, _ = lower_bounds(floors, applies=applies)
        return strategy._needed(work, found, (configuration, hold), known, available)

    assert needed(PLAIN, {}, infinite) and needed(PLAIN, {}, infinite, hold=True)
    assert not needed(PLAIN, lines_of({SAMPLES: (24, 3)}), tight, hold=True), "eight at once lose less than four"
    assert not needed(SAMPLES, lines, infinite), "the whole batch fits already"
    assert needed(SAMPLES, lines, tight), "which runs all eight at once"
    assert not needed(SAMPLES, lines, tight, applies=lambda each: not each.by_sample), "no block would run by sample"
    assert not needed(CODED, lines, tight), "which loses more than four at a time"
    assert needed(CUT, {}, tight) and not needed(CUT, {}, tight, applies=lambda each: not each.pruned)


def test_what_fits_is_not_lost_to_measuring_another():
    """Four at a time take 41 MB of 42; another probe would leave nearly one behind, and 42.5 suffice for it."""
    lines, floors = lines_of({PLAIN: (20, 5)}), dict.fromkeys((PLAIN, SAMPLES), (20, 30))
    found, _ = lower_bounds(floors)
    for headroom, wanted in ((41 + 1.1, False), (41 + 2.1, True)):
        available = headroom * MB * (1 + SAFETY.share) + SAFETY.bytes + RESERVED_BYTES
        assert Sidenet()._needed(workload(batch_size=8), found, (SAMPLES, False), lines, available) == wanted


def test_a_variant_is_tried_only_where_it_may_fit():
    """Its fewest images must, and of a variant that takes a batch at once the whole batch."""
    found, asked = lower_bounds({PLAIN: (20, 60), SAMPLES: (20, 30), CODED: (14, 54)})
    coded, whole, by_sample, parts = (CODED, True), (PLAIN, False), (SAMPLES, False), (PLAIN, True)
    headroom = 31 * MB + PROBE_GROWTH
    assert [found.may_fit(variant, headroom, {}) for variant in (whole, by_sample, parts)] == [False, True, True]
    assert [found.may_fit(variant, 16 * MB, {}) for variant in (parts, coded, (CODED, False))] == [False, True, False]
    assert [found.may_fit(variant, 12 * MB, {}) for variant in (parts, by_sample, coded)] == [False, False, True], (
        "the one that takes least is left, to say how much that is"
    )
    assert max(Counter(asked).values()) == 1, "each is computed once"
    assert not any("by sample" in name and batch < 8 for name, batch in asked), "which is as one image alone is"


def test_a_pruned_variant_takes_what_retraining_takes():
    found, _ = lower_bounds({PLAIN: (20, 60), CUT: (12, 30)}, retraining=24 * MB)
    assert found.smallest == (PLAIN, True)
    assert not found.may_fit((CUT, True), 21 * MB, {}) and found.may_fit((CUT, True), 25 * MB, {})


def test_estimate_by_hand():
    made = proposed(Sidenet(), {PLAIN: (20, 5)}, budget_for(46 * MB))
    assert (made.micro_batch, made.micro_batches) == (4, 2)
    cost = made.estimate(workload(batch_size=8), profile(lines_of({PLAIN: (20, 5)})), HARDWARE)
    assert cost.peak_bytes == int((41 * MB + 1) * (1 + SAFETY.share)) + SAFETY.bytes
    a_micro_batch, passed = 0.01 * 4 / 2, 200 + 256  # for validation, and for the side network's statistics
    assert cost.seconds_per_epoch == pytest.approx(125 * 2 * a_micro_batch + 0.3 * passed * a_micro_batch / 4)
    assert cost.seconds == pytest.approx(3 * cost.seconds_per_epoch)


def test_shortfall_names_the_least_of_all_floors():
    found = profile({}, floors={PLAIN.probe: 100 * MB, CODED.probe: 80 * MB, "other": MB})
    lack = Sidenet().shortfall(workload(), found, HARDWARE, Budget(20 * MB))
    assert lack.smallest_bytes == 105 * MB, "1.12 x (80 + 12 x 0.3) MB, 1.5 %, 2.5 + 5 + 2 MB, rounded up"


def test_shortfall_names_what_a_part_of_the_batch_takes_with_what_goes_before():
    floors = {
        PLAIN.probe: 60 * MB,
        line_name(PLAIN.probe, hold=True): 90 * MB,
        line_name(CUT.probe, hold=True): 40 * MB,
        RETRAIN: 80 * MB,
    }
    lack = Sidenet().shortfall(workload(), profile({}, floors=floors), HARDWARE, Budget(20 * MB))
    assert lack.smallest_bytes == 105 * MB


def test_schemes_without_a_side_network_have_one_width():
    assert (
        Configuration(0.0)
        in Sidenet(scheme="head", side_width=0.5, sample_wise="off", weight_storage="float32").candidates
    )


def test_a_pruned_run_has_a_phase_before():
    """After selection on 512 images, all 1000 are retrained on 8 times, as many at once as fit.

    Of 0.1 s for an image, selection takes two thirds and a step the third.
    """
    made = proposed(Sidenet(), {CUT: (4, 2)}, budget_for(25 * MB))
    assert made.retrain_batch == 8 and made.configuration == CUT
    cost = made.estimate(workload(batch_size=8), profile(lines_of({CUT: (4, 2)})), HARDWARE)
    first, second = cost.phases
    assert (first.name, first.batch_size, second.name, second.batch_size) == ("prune", 8, "fine-tune", 8)
    assert first.peak_bytes == int(
        (10 * MB + 1 + LEFT_BY_RETRAINING) * (1 + SAFETY.share)
    ) + SAFETY.bytes and first.seconds == pytest.approx((2 * 512 + 8 * 1000) / 3 * 0.1)
    assert cost.peak_bytes == second.peak_bytes and cost.seconds == pytest.approx(first.seconds + second.seconds)


def test_retraining_must_fit_too():
    lines = lines_of({CUT: (4, 0)}) | {RETRAIN: line(2 * MB, 9 * MB)}
    found = list(Sidenet().propose(workload(batch_size=8), profile(lines), HARDWARE, budget_for(25 * MB)))
    assert found[0].retrain_batch == 2, "2 + 2 x 9"
    assert not list(Sidenet().propose(workload(batch_size=8), profile(lines), HARDWARE, budget_for(10 * MB)))


def test_low_memory_settings_are_one_configuration_each_and_keep_set_options():
    found = [Sidenet(**each).candidates for each in Sidenet.leaner(StrategyOptions("sidenet"))]
    expected = [(1.0, False, True, True), (0.25, False, True, True), (0.25, True, True, True)]
    assert found == [(Configuration(*each),) for each in expected]
    asked = StrategyOptions("sidenet", side_width=0.5, prune="off", weight_storage="float32", sample_wise="off")
    assert list(Sidenet.leaner(asked)) == [{"side_width": 0.5}]
    assert list(Sidenet.leaner(StrategyOptions("sidenet", scheme="bias+head"))) == [{"weight_storage": "int8"}]


def test_blockwise_tries_units_and_the_leanest_loss_only_where_none_was_named():
    def tried(**options):
        return list(Blockwise.leaner(StrategyOptions("blockwise", **options)))

    assert tried() == [{"module_units": "1", "local_loss": "lls-mxm"}]
    assert tried(local_loss="auglocal", module_units="1") == [{"local_loss": "auglocal:depth=1"}]
    assert tried(local_loss="aan") == [{"module_units": "1"}]
    assert tried(local_loss="aan", module_units="1") == []
