"""What a plan says of itself."""

from dataclasses import replace

import pytest

from snugfit._core.budget import Budget
from snugfit._core.explanation import TOO_LATE, explanation_of
from snugfit._core.hardware import Hardware
from snugfit._core.option_groups import SYNTHETIC
from snugfit._core.plan import Candidate, Cost, Phase, Plan, ranked
from snugfit._core.workload import OptimizerSettings, Workload

MB = 10**6
HARDWARE = Hardware("cpu", "cpu", 1, 10**9, "Linux", "2", True)
WORKLOAD = Workload("net", "images", (3, 4, 4), 2, 10, 5, 5)
BLOCKS = Candidate("blockwise", True, {}, Cost(50 * MB, 1, 10.0))
PLAIN = Candidate("backprop", True, {"micro_batches": 1}, Cost(90 * MB, 1, 30.0), exact=True)
AGAIN = Candidate("checkpoint", True, {}, Cost(60 * MB, 1, 40.0), exact=True)
SIDE = Candidate("sidenet", True, {}, Cost(40 * MB, 1, 20.0))
NO_WEIGHTS = Candidate("sidenet", False, reasons=("needs pre-trained --weights",), considered=False)


def said(*candidates, aim="time", budget=None):
    plan = Plan(WORKLOAD, budget or Budget(), HARDWARE, ranked(candidates, aim), 0, aim)
    return explanation_of(plan)


def test_the_choice_its_aim_and_the_next_best():
    first, gradients, *others = said(AGAIN, BLOCKS, PLAIN)
    assert (
        first
        == "blockwise is chosen for the least time to finish: 10.0s against 30.0s with backprop, 3.0 times as much."
    )
    assert "not those of the network's own loss" in gradients
    assert others == ["--aim accuracy would choose backprop: 90.0 MB, 30.0s, with exact gradients."]


def test_a_choice_of_what_there_was_time_for_is_not_called_asked_for():
    late = Candidate("blockwise", False, reasons=(TOO_LATE,), considered=False)
    assert said(PLAIN, late)[0] == (
        "backprop is chosen: nothing else that was measured in --profile-time fits the budget."
    )


def test_fine_tuning_on_few_images_is_named():
    tuned = replace(SIDE, strategy="elastic", fine_tunes=True)
    assert "10 training images are few" in said(PLAIN, tuned, aim="accuracy")[0]
    assert not any("are few" in each for each in said(PLAIN, SIDE, aim="accuracy"))


def test_counts_that_were_assumed_without_data_are_named():
    work = replace(WORKLOAD, data=SYNTHETIC, train_count=12_000, val_count=300, test_count=400)
    *_, counts, how = explanation_of(Plan(work, Budget(), HARDWARE, (PLAIN,), 0))
    assert all(number in counts for number in ("12,000 training images", "300 to validate", "400 to test"))
    assert "--data replaces --input-shape" in how
    assert not any("--input-shape" in each for each in said(PLAIN))


@pytest.mark.parametrize(("images", "named"), [(1, "1 image at"), (4, "4 images at"), (8, ""), (None, "")])
def test_batch_norms_of_few_images_are_named(images, named):
    sentences = said(replace(AGAIN, norm_images=images), SIDE, aim="accuracy")
    found = [each for each in sentences if "batch norms normalise" in each]
    assert found == ([f"With checkpoint, batch norms normalise {named} a time, which costs accuracy."] if named else [])
    assert sentences[0].startswith("sidenet is chosen" if named else "checkpoint is chosen")


def test_a_faster_one_that_loses_accuracy_to_batch_norms_comes_last():
    few = replace(PLAIN, norm_images=2)
    first, *_ = said(few, AGAIN, replace(SIDE, predicted=Cost(40 * MB, 1, 60.0)))
    assert first == (
        "checkpoint is chosen for the least time to finish of those that lose no accuracy to batch norms: "
        "40.0s against 1m00s with sidenet, 1.5 times as much."
    )
    last = said(few, AGAIN)[0]
    assert "backprop would be faster (40.0s against 30.0s with backprop), but is expected to lose more" in last
    assert "batch norms" not in said(few, BLOCKS)[0], "it is not faster"
    assert said(few)[0] == "backprop is chosen: it was asked for."


@pytest.mark.parametrize(("settings", "named"), [({"batch_norm": "micro", "micro_batches": 8}, True), ({}, False)])
def test_a_remedy_for_norms_of_few_images_is_named_where_there_is_one(settings, named):
    sentences = said(replace(AGAIN, norm_images=2, settings=settings), SIDE, aim="accuracy")
    (found,) = [each for each in sentences if "batch norms normalise" in each]
    assert ("with --batch-norm exact they would normalise all images of a step" in found) is named


@pytest.mark.parametrize(
    ("settings", "found"), [({"state": "int8"}, True), ({}, False), ({"state": "int8", "momentum": 0.0}, False)]
)
def test_rounded_optimizer_state_is_named(settings, found):
    work = replace(WORKLOAD, optimizer=OptimizerSettings(**settings))
    sentences = explanation_of(Plan(work, Budget(), HARDWARE, (PLAIN,), 0))
    assert any("not exact: --optimizer-state int8" in each for each in sentences) is found


@pytest.mark.parametrize(("activations", "word"), [("int8", "nearly exact"), ("exact", "exact")])
def test_rounded_feature_maps_are_named(activations, word):
    choice = replace(PLAIN, exact=activations == "exact")
    plan = Plan(replace(WORKLOAD, activations=activations), Budget(), HARDWARE, (choice,), 0)
    sentence = explanation_of(plan)[1]
    assert sentence.startswith(f"Its gradients are {word}: those of plain backpropagation")
    assert ("--activations int8 rounds" in sentence) is (activations == "int8")


def test_kept_memory_of_the_choice_makes_no_other_strategy_better():
    """Equal in time, backprop needs less than checkpoint, whatever it may keep besides."""
    phase = Phase("network", 150 * MB, 30.0, 4, kept_bytes=90 * MB)
    plain = replace(PLAIN, predicted=Cost(150 * MB, 1, 30.0, phases=(phase,)))
    again = replace(AGAIN, predicted=Cost(61 * MB, 1, 30.0))
    assert [each.strategy for each in ranked([again, plain], "accuracy")] == ["backprop", "checkpoint"]
    assert not any("would choose" in sentence for sentence in said(plain, again))


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [("full", "All tensors train"), ("head", "Only some tensors train"), ("prunetrain", "channels are removed"),
     ("elastic", "only the most important tensors train")],
)  # fmt: skip
def test_elastic_says_what_its_scheme_trains(scheme, sentence):
    chosen = Candidate("elastic", True, {"scheme": scheme}, Cost(50 * MB, 1, 10.0))
    assert sum(sentence in each for each in said(chosen)) == 1


def test_rounded_weights_are_named():
    work = replace(WORKLOAD, optimizer=OptimizerSettings(state="int8"), weight_dtype="bfloat16")
    both = "rounds the optimizer's state and --weight-dtype bfloat16 rounds weights at random after every step."
    assert any(each.endswith(both) for each in explanation_of(Plan(work, Budget(), HARDWARE, (PLAIN,), 0)))


def test_the_least_memory():
    first, _, *others = said(PLAIN, AGAIN, BLOCKS, aim="memory")
    assert first.endswith("least predicted peak: 50.0 MB against 60.0 MB with checkpoint, 1.2 times as much.")
    assert others == ["--aim accuracy would choose backprop: 90.0 MB, 30.0s, with exact gradients."]


def test_accuracy_and_what_it_costs():
    first, gradients, *_ = said(BLOCKS, PLAIN, aim="accuracy")
    assert first.endswith("nothing else that fits has exact gradients of everything.")
    assert gradients == "Its gradients are exact: those of plain backpropagation."
    slower, *_ = said(SIDE, BLOCKS, aim="accuracy")
    assert "blockwise would be faster (20.0s against 10.0s with blockwise), but is expected to lose more" in slower


def test_what_is_nearly_alike_is_not_told_apart():
    close = replace(AGAIN, predicted=Cost(60 * MB, 1, 30.5))
    assert said(PLAIN, close)[0].endswith("30.0s against 30.5s with checkpoint, which is about the same.")


def test_one_module_that_computes_the_same():
    module = replace(BLOCKS, predicted=Cost(90 * MB, 1, 28.0), exact=True)
    first, gradients = said(module, PLAIN)
    assert first == (
        "backprop is chosen for the least time to finish. With its settings here, blockwise is backpropagation too, "
        "predicted at 28.0s; backprop comes first as the plainer of the two."
    )
    again = replace(AGAIN, predicted=Cost(990 * MB, 1, 30.0))
    assert said(module, PLAIN, again)[0] == (
        "backprop is chosen for the least time to finish: 30.0s against 30.0s with checkpoint, which is about the "
        "same. With its settings here, blockwise is backpropagation too, predicted at 28.0s; backprop comes first as "
        "the plainer of the two."
    )
    smaller = replace(module, predicted=Cost(90 * MB, 1, 28.0, phases=(Phase("block 1", 90 * MB, 28.0, 2, ("a",)),)))
    assert said(smaller, PLAIN)[0].endswith(
        "blockwise is backpropagation too, in steps of 2 images, predicted at 28.0s; backprop comes first since its "
        "steps have more images."
    )
    assert said(module)[1] == gradients == "Its gradients are exact: those of plain backpropagation."


def test_micro_batches_are_told():
    accumulated = replace(PLAIN, settings={"micro_batches": 4})
    assert "accumulated over 4 micro-batches" in said(accumulated)[1]


@pytest.mark.parametrize(("images", "parts", "smaller"), [(2, 1, True), (2, 4, True), (10, 1, False), (5, 2, False)])
def test_a_smaller_step_than_the_batch_size_is_explained(images, parts, smaller):
    """The batch size is 128; there are 10 training images."""
    sentences = said(replace(PLAIN, settings={"micro_batch": images, "micro_batches": parts}))
    words = f"A step trains on {images * parts} images instead of the 10 of --batch-size"
    assert any(each.startswith(words) for each in sentences) == smaller


def smaller_steps(**settings):
    micro = {"micro_batch": 2, "micro_batches": 1, **settings}
    return next(each for each in said(replace(PLAIN, settings=micro)) if "--batch-size" in each)


def test_learning_rates_of_an_optimizer_from_python_have_no_flag():
    work = replace(WORKLOAD, optimizer=OptimizerSettings("python", lr=1.0))
    small = replace(PLAIN, settings={"micro_batch": 2, "micro_batches": 1})
    sentences = explanation_of(Plan(work, Budget(), HARDWARE, (small,), 0))
    (found,) = (each for each in sentences if "--batch-size" in each)
    assert found.endswith("Consider lower learning rates; in proportion they are 0.2 times those of your optimizer.")


def test_a_smaller_step_without_accumulation_has_its_own_reason():
    rest = "A step trains on 2 images instead of the 10 of --batch-size: "
    assert smaller_steps(accumulate=True) == (
        rest + "a larger batch, or its accumulated gradients, would exceed the budget. "
        "Consider a lower --lr; in proportion it is 0.002."
    )
    assert smaller_steps(accumulate=False) == (
        rest + "a larger batch would exceed the budget, and --no-accumulate allows one batch per step. "
        "Consider a lower --lr; in proportion it is 0.002."
    )


@pytest.mark.parametrize(
    ("batches", "start"),
    [((4,), "A step trains on 4"), ((10, 3, 7), "The smallest step of its 3 blocks trains on 3"), ((10, 10), None)],
)
def test_smaller_steps_of_blocks_which_do_not_accumulate(batches, start):
    phases = tuple(Phase("block", MB, 1.0, batch, ("a",)) for batch in batches)
    cost = replace(BLOCKS.predicted, phases=(*phases, Phase("exit", MB, 1.0, 1)))
    sentences = [each for each in said(replace(BLOCKS, predicted=cost)) if "--batch-size" in each]
    rest = " images instead of the 10 of --batch-size, because blockwise does not accumulate. "
    advice = f"Consider a lower --lr; in proportion it is {0.001 * min(batches):g}."
    assert sentences == ([start + rest + advice] if start else [])


COSTS = (("auglocal:depth=2", (9, 9), 250), ("aan", (8, 8), 120), ("lls-mxm", (4, 4), 100))
FEW, EACH = ((0, 1, ""), (2, 2, "")), ((0, 0, ""), (1, 1, ""), (2, 2, ""))


def about_aims(modules, *others, aim="time", **settings):
    """Sentences about other aims of a plan with blockwise in these modules."""
    given = {"modules": modules, "loss_aim": aim, "module_units": "auto", "local_loss": "aan", **settings}
    units = tuple(Phase("block", MB, 1.0, 10, (str(module),)) for module in modules)
    cost = replace(BLOCKS.predicted, phases=units)
    return [
        each.partition(":")[0]
        for each in said(replace(BLOCKS, settings=given, predicted=cost, exact=len(modules) == 1), *others, aim=aim)
        if each.startswith(("--aim", "With --aim")) and "keeps one unit" not in each
    ]


def test_another_aim_that_changes_settings_is_given_no_figures():
    leaner = "With --aim memory, blockwise has other settings and may need less memory."
    faster = "With --aim time, blockwise has other settings and may take less time."
    accurate = "--aim accuracy would choose backprop"
    lean = replace(SIDE, predicted=Cost(MB, 1, 90.0))
    for settings in ({}, {"loss_costs": COSTS}):
        assert about_aims(FEW, PLAIN, lean, **settings) == [leaner, accurate]
        assert about_aims(FEW, **settings)[0] == leaner
    assert about_aims(EACH, PLAIN, lean) == ["--aim memory would choose sidenet", accurate]
    assert about_aims(EACH, PLAIN, loss_costs=COSTS) == [leaner, accurate]
    better = "With --aim accuracy, blockwise has other settings and may be more accurate."
    assert about_aims(EACH, loss_costs=COSTS, local_loss="lls-mxm") == [better]
    cheap = (("auglocal:depth=2", (9, 9), 150), *COSTS[1:])
    assert about_aims(EACH, loss_costs=cheap) == [leaner], "both aims consider the same losses"
    fixed = {"module_units": "2"}
    assert about_aims(FEW, PLAIN, lean, **fixed) == ["--aim memory would choose sidenet", accurate]
    assert about_aims(FEW, PLAIN, block_units=2) == [accurate]
    assert about_aims(EACH, PLAIN, aim="memory") == [faster, accurate]
    best = {"loss_costs": COSTS, "local_loss": "auglocal:depth=2"}
    assert about_aims(FEW, aim="accuracy", **best) == [faster, leaner]
    assert about_aims(((0, 2, ""),), PLAIN, lean, loss_costs=COSTS) == [leaner]


def test_weights_open_a_strategy_and_their_lack_closes_it():
    assert any("from scratch, so sidenet is not considered" in each for each in said(PLAIN, NO_WEIGHTS))
    assert any("sidenet was considered too" in each for each in said(PLAIN, SIDE, aim="accuracy"))
    assert not any("weights" in each for each in said(PLAIN, NO_WEIGHTS, budget=Budget(time_ratio=0.5)))


def test_more_storage_is_offered_where_it_would_save_time():
    stored = replace(BLOCKS, feasible=False, predicted=Cost(50 * MB, 1, 10.0, 7_100_000), reasons=("storage",))
    assert "With --storage 8MB, blockwise would take 10.0s instead of 30.0s." in said(
        PLAIN, stored, budget=Budget("100MB", "5MB")
    )
    both = replace(stored, predicted=replace(stored.predicted, peak_bytes=101 * MB))
    slow = replace(stored, predicted=replace(stored.predicted, seconds=29.0))
    for useless in (both, slow):
        assert not any("--storage" in each for each in said(PLAIN, useless, budget=Budget("100MB", "5MB")))


def test_the_only_one():
    assert said(PLAIN)[0] == "backprop is chosen: it was asked for."
    lacks = Candidate("checkpoint", False, reasons=("one sample needs 9 MB",))
    assert said(PLAIN, lacks)[0] == "backprop is chosen: nothing else fits the budget."


def test_nothing_is_said_of_nothing():
    assert explanation_of(Plan(WORKLOAD, Budget(), HARDWARE, (NO_WEIGHTS,))) == ()
