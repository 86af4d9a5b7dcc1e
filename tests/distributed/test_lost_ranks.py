"""A process that is killed, stopped or at fault is named by all others within the limit, and nothing hangs."""

import signal
import time

import pytest
from three_ranks import Ranks

LIMIT = 3.0
SLACK = 6.0
"""Seconds beyond the limit that two busy cores may take; a hang would be torch's 30 minutes."""


@pytest.mark.parametrize(
    ("what", "lost", "number"),
    [
        pytest.param("sums", 1, signal.SIGKILL, marks=pytest.mark.slow),
        ("sums", 1, signal.SIGSTOP),
        pytest.param("sums", 0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("commands", 0, signal.SIGSTOP, marks=pytest.mark.slow),
        ("commands", 1, signal.SIGKILL),
    ],
)
def test_a_lost_rank_is_named(tmp_path, what, lost, number):
    with Ranks(tmp_path, LIMIT, what) as ranks:
        ranks.wait_until_ready()
        pid, since = ranks.all[lost].pid, ranks.signal(lost, number)
        others = [0] if what == "commands" and lost else []
        for rank in {0, 1, 2} - {lost, *others}:
            code, said = ranks.end(rank, 3 * LIMIT + SLACK)
            assert code == 8 and f"lost rank {lost} (process {pid} on " in said, said
            assert "--resume RUN" in said and len(said.splitlines()) <= 2
        assert time.monotonic() - since < 2 * LIMIT + SLACK


def test_a_rank_that_fails_on_its_own_is_named_at_once(tmp_path):
    with Ranks(tmp_path, 20.0, "fault") as ranks:
        assert ranks.end(1, 30)[0] == 1
        since = time.monotonic()
        for rank in (0, 2):
            code, said = ranks.end(rank, 30)
            assert code == 8 and "lost rank 1 (process" in said, said
        assert time.monotonic() - since < 15


def test_all_leave_without_errors(tmp_path):
    with Ranks(tmp_path, LIMIT, "end") as ranks:
        for rank in range(3):
            code, said = ranks.end(rank, 60)
            assert code == 0 and said.split() == ["joined", "ready"], said
