"""What each aim prefers."""

from dataclasses import replace

import pytest

from snugfit._core.plan import Candidate, Cost, ranked


def fits(strategy, peak, seconds, exact=False):
    return Candidate(strategy, True, {}, Cost(peak, seconds, seconds), exact=exact)


BLOCKS, PLAIN = fits("blockwise", 50, 10), fits("backprop", 90, 30, exact=True)
AGAIN, SIDE = fits("checkpoint", 60, 40, exact=True), fits("sidenet", 40, 20)
SHORT = Candidate("backprop", False, {}, Cost(999, 1.0, 1.0), ("needs 999 B",), exact=True)
LACKS = Candidate("elastic", False, reasons=("one sample needs 9 MB",))
UNASKED = Candidate("feedback", False, reasons=("to compare with",), considered=False)


@pytest.mark.parametrize(
    ("aim", "order"),
    [
        ("time", [BLOCKS, SIDE, PLAIN, AGAIN]),
        ("memory", [SIDE, BLOCKS, AGAIN, PLAIN]),
        ("accuracy", [PLAIN, AGAIN, SIDE, BLOCKS]),
    ],
)
def test_what_fits_by_the_aim_and_then_the_rest(aim, order):
    given = [UNASKED, LACKS, AGAIN, SHORT, PLAIN, SIDE, BLOCKS]
    assert list(ranked(given, aim)) == [*order, SHORT, LACKS, UNASKED]


@pytest.mark.parametrize(("images", "first"), [(2, SIDE), (7, SIDE), (8, PLAIN), (None, PLAIN)])
def test_exact_gradients_do_not_make_up_for_batch_norms_of_few_images(images, first):
    few = replace(PLAIN, norm_images=images)
    first = few if first is PLAIN else first
    assert ranked([few, SIDE], "accuracy")[0] is first
    assert ranked([few, BLOCKS], "accuracy")[0] is (few if first is few else BLOCKS)
    assert ranked([few, AGAIN], "accuracy")[0] is (few if first is few else AGAIN)
    assert ranked([few, SIDE]) == (SIDE, few)
    assert ranked([few, AGAIN])[0] is (few if first is few else AGAIN), "no time is worth it"
    assert ranked([few, fits("c", 100, 10)], "memory")[0] is few


def test_fine_tuning_on_few_images_comes_first_where_accuracy_is_the_aim():
    tuned = replace(SIDE, strategy="elastic", fine_tunes=True)
    assert ranked([PLAIN, SIDE, tuned], "accuracy") == (tuned, PLAIN, SIDE)
    assert ranked([PLAIN, replace(tuned, feasible=False)], "accuracy")[0] is PLAIN, "what does not fit is not chosen"
    assert ranked([BLOCKS, tuned])[0] is BLOCKS


def test_what_is_alike_is_ranked_by_the_rest():
    lean, fast = fits("a", 40, 10), fits("b", 50, 10)
    assert ranked([fast, lean]) == (lean, fast)
    assert ranked([fits("c", 40, 20), lean], "memory")[0] is lean
    assert ranked([], "memory") == ()


def test_one_module_comes_after_the_strategy_that_it_computes_the_same_as():
    """Past runs correct the seconds of each strategy by themselves, so that no ratio of seconds is too large."""
    for seconds in (1, 25, 30):
        module = fits("blockwise", 80, seconds, exact=True)
        assert ranked([module, PLAIN, SIDE]) == (SIDE, PLAIN, module)
        assert ranked([module, PLAIN, AGAIN], "accuracy") == (PLAIN, module, AGAIN)
        assert ranked([module, AGAIN]) == (AGAIN, module)
        assert ranked([module, SHORT]) == (module, SHORT), "what does not fit displaces nothing"
