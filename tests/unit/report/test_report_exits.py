"""The frontier and the confused pairs, against slow oracles."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from snugfit._core.record import ExitRecord
from snugfit._report.results import confused_pairs, pareto

points = st.lists(st.tuples(st.integers(0, 10), st.integers(1, 6)), min_size=1, max_size=12)


@given(points)
@settings(max_examples=100, deadline=None)
def test_frontier_holds_exactly_what_nothing_beats(drawn):
    exits = [ExitRecord(f"u{i}", i, value / 10, size) for i, (value, size) in enumerate(drawn)]
    expected = {
        (e.val_accuracy, e.parameters)
        for e in exits
        if not any(
            (o.val_accuracy >= e.val_accuracy and o.parameters < e.parameters)
            or (o.val_accuracy > e.val_accuracy and o.parameters <= e.parameters)
            for o in exits
        )
    }
    frontier = pareto(exits)
    assert {(e.val_accuracy, e.parameters) for e in frontier} == expected
    assert [e.parameters for e in frontier] == sorted({size for _, size in expected})


def test_confused_pairs_are_shares_of_the_true_class():
    pairs = confused_pairs([[8, 2, 0], [1, 1, 0], [0, 0, 0]], ("a", "b", "c"))
    assert pairs == [("b", "a", 0.5, 1), ("a", "b", 0.2, 2)]
