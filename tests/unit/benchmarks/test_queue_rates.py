"""How the queue chooses learning rates."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from benchmarks.queue.arms import Arm
from benchmarks.queue.rungs import Row, Task, choose_lr, order, rungs_of
from queue_samples import DIGESTS, arm, rows_of


class TestTuning:
    rates = (0.01, 0.03, 0.1)
    tuned = arm("t", lrs=rates)

    def tried(self, values: dict[float, float], of: Arm = tuned, **more: object) -> dict[str, Row]:
        rows = dict[str, Row]()
        for lr, val in values.items():
            rows |= rows_of([Task(of, rungs_of(of)[0], 0, lr)], val=val, **more)
        return rows

    @pytest.mark.parametrize(
        ("values", "rates"),
        [
            ({0.01: 0.5, 0.03: 0.6, 0.1: 0.5}, []),
            ({0.01: 0.5, 0.03: 0.6, 0.1: 0.7}, [0.3]),
            ({0.01: 0.7, 0.03: 0.6, 0.1: 0.5}, [0.003]),
            ({0.01: 0.5, 0.03: 0.6, 0.1: 0.7, 0.3: 0.6}, []),
            ({0.01: 0.5, 0.03: 0.6, 0.1: 0.7, 0.3: 0.8}, [0.9]),
            ({0.01: 0.5, 0.03: 0.6, 0.1: 0.7, 0.3: 0.8, 0.9: 0.9}, []),
        ],
    )
    def test_the_search_goes_on_while_the_best_rate_is_the_last_on_its_side(
        self, values: dict[float, float], rates: list[float]
    ) -> None:
        left = order([self.tuned], self.tried(values), DIGESTS)
        assert [task.lr for task in left if task.rung == 0] == rates
        assert all(task.provisional for task in left if task.rung) == bool(rates)

    def test_rates_are_tried_first_and_everything_else_waits(self) -> None:
        tasks = order([self.tuned], {}, DIGESTS)
        ready, waiting = tasks[:3], tasks[3:]
        assert [(task.rung, task.seed, task.lr) for task in ready] == [(0, 0, rate) for rate in self.rates]
        assert [(task.rung, task.seed) for task in waiting] == list(itertools.product((1, 2), (0, 1, 2)))
        assert [task.provisional for task in tasks] == [False] * 3 + [True] * 6

    def test_what_validates_best_is_taken_in_longer_rungs_alone(self) -> None:
        left = order([self.tuned], self.tried({0.01: 0.5, 0.03: 0.6, 0.1: 0.5}), DIGESTS)
        assert {task.lr for task in left} == {0.03}
        assert [(task.rung, task.seed) for task in left[:3]] == [(1, 0), (1, 1), (1, 2)]

    def test_an_arm_of_one_rung_keeps_its_trial_as_a_seed(self) -> None:
        short = arm("t", images=900, epochs=5, lrs=self.rates)
        left = order([short], self.tried({0.01: 0.5, 0.03: 0.6, 0.1: 0.5}, short), DIGESTS)
        assert [(task.rung, task.seed, task.lr) for task in left] == [(2, 1, 0.03), (2, 2, 0.03)]

    def test_arms_of_a_group_share_the_rate_that_is_best_on_average(self) -> None:
        one, two, other, waiting = (
            replace(self.tuned, name=name, group=group, settings={**self.tuned.settings, "memory": name})
            for name, group in (("a", "g"), ("b", "g"), ("c", ""), ("d", "g"))
        )
        rows = self.tried({0.01: 0.5, 0.03: 0.6, 0.1: 0.3}, one) | self.tried({0.01: 0.5, 0.03: 0.5, 0.1: 0.7}, two)
        rows |= self.tried({0.3: 0.6}, two) | self.tried({0.01: 0.5, 0.03: 0.6, 0.1: 0.5}, other)
        rows |= self.tried({0.01: 0.2}, waiting)
        digests = {each.sources: DIGESTS[self.tuned.sources] for each in (one, two, other, waiting)}
        left = order([one, two, other, waiting], rows, digests)
        rates = {name: {task.lr for task in left if task.arm.name == name and task.rung} for name in "abcd"}
        assert rates == {"a": {0.03}, "b": {0.03}, "c": {0.03}, "d": {None}}
        rows |= self.tried({0.03: 0.1, 0.1: 0.9, 0.3: 0.1}, waiting)
        left = order([one, two, other, waiting], rows, digests)
        rates = {name: {task.lr for task in left if task.arm.name == name and task.rung} for name in "abcd"}
        assert rates == {"a": {0.1}, "b": {0.1}, "c": {0.03}, "d": {0.1}}

    def test_a_rate_that_diverges_is_never_taken(self) -> None:
        rows = self.tried({0.01: 0.5}, code=7) | self.tried({0.03: 0.0, 0.1: 0.0})
        assert choose_lr([Task(self.tuned, 0, 0, rate) for rate in self.rates], rows) == 0.03

    def test_trials_of_other_sources_choose_a_rate_and_are_run_again_after_all_else(self) -> None:
        rows = self.tried({0.01: 0.5, 0.03: 0.6, 0.1: 0.5}, digest="b0")
        left = order([self.tuned, arm("other")], rows, DIGESTS)
        assert {task.lr for task in left if task.arm == self.tuned and task.rung} == {0.03}
        assert [(task.lr, task.stale) for task in left[-3:]] == [(rate, True) for rate in self.rates]
