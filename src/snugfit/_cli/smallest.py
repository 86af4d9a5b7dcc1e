"""Search the smallest memory budget that would do by asking fresh processes, as the user's next command will be asked.

What is measured in one budget tells roughly how much less would do, and no more: in a smaller budget other batch sizes
are measured, which leave other kernels in memory. VGG-8 in bfloat16 had 24.1 MB in use after profiling in 91 MB, and
27.9 in 83 MB, which 91 MB had named. So the budget that is named was asked for itself, as was the one ``LESS`` below.
"""

from __future__ import annotations

from collections.abc import Callable

STEPS = (1.0, 1.3, 1.7)
"""Budgets that are asked for until one does, over what is expected to."""
LESS = 3
"""MB below the smallest budget that are known not to do."""
Ask = Callable[[int], "int | None"]
"""Asks a fresh process with a budget in MB: the smallest that would do by what it measured; None where it refuses."""


def smallest_that_fits(ask: Ask, guess: int, refused: int, most: int, enough: int | None = None) -> int | None:
    """The smallest budget, in MB, that fits when asked for, where ``LESS`` below it does not.

    Args:
        ask: asks a fresh process.
        guess: what is expected to do, in MB.
        refused: largest budget that is known not to do.
        most: largest budget to try.
        enough: what is not needed more exactly: a larger one than this is returned as soon as it is found.

    Returns:
        None where nothing fits any budget that was tried.
    """
    refusals = {refused}
    for step in STEPS:
        high = max(int(guess * step), refused + 1)
        if high > most:
            return None
        told = ask(high)
        if told is not None:
            break
        refusals.add(high)
    else:
        return None
    return _narrowed(ask, max(high, told), max(told, refused + 1), refusals, enough)


def _narrowed(ask: Ask, high: int, told: int, refusals: set[int], enough: int | None) -> int:
    """Lower a budget that fits, while ``LESS`` below it is not refused.

    What was told by the last answer is tried first; after a refusal a little more, and then twice as much more.
    """
    step, refused = LESS, min(refusals)
    while high - LESS > refused and high - LESS not in refusals:
        if enough is not None and told > enough:
            return told
        low = max(each for each in refusals if each < high)
        size = told if low < told < high else high - LESS
        found = ask(size)
        if found is None:
            refusals.add(size)
            told, step = size + step, 2 * step
        else:
            high, told = max(size, found), max(found, refused + 1)
    return high
