"""All schedules of a few units, and those that cut them into segments."""

from functools import cache

from snugfit.strategies.recomputation.schedule import Schedule


def in_segments(count, starts):
    """Every segment runs again but the last; ``starts`` are their first units."""
    ends = [*starts[1:], count]
    segments = [tuple(range(start, end)) for start, end in zip(starts, ends, strict=True)]
    return Schedule((*(Schedule(segment) for segment in segments[:-1]), *segments[-1]))


def at_the_square_root(count):
    """Chen et al. 2016, section 4.1: about sqrt(count) segments of equal length."""
    step = max(round(count**0.5), 1)
    return in_segments(count, list(range(0, count, step)))


def every_split(count):
    """All ways to cut units into segments."""
    for mask in range(2 ** (count - 1)):
        yield in_segments(count, [0, *[i for i in range(1, count) if mask >> (i - 1) & 1]])


@cache
def every_schedule(first, last):
    """All schedules of units that end in a unit which keeps what it saves, as one that is reached does."""
    if first == last:
        return [(first,)]
    found = [(first, *rest) for rest in every_schedule(first + 1, last)]
    for cut in range(first + 1, last + 1):
        found += [
            (Schedule(again), *rest) for again in every_schedule(first, cut - 1) for rest in every_schedule(cut, last)
        ]
    return found
