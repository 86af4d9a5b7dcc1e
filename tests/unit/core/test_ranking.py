"""What each aim prefers."""

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
