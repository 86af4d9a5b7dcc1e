"""The launcher's rounds, against hosts that speak its protocol and fail as they are told."""

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from snugfit._cli.launcher import Terms, run_all
from snugfit._cli.member import AGENT, Member, Start
from snugfit.errors import UsageError

FAKE = str(Path(__file__).parent / "fakes" / "agent.py")
STORE = "10.0.0.1:29400"


def host(name, *rounds, processes=1, **more):
    plan = json.dumps({"name": name, "rounds": rounds, **more})
    return Start(name, (sys.executable, FAKE, plan), processes=processes)


def launched(*starts, restarts=2, least=1, silence=1.0, joining=20.0):
    lines = []
    code = run_all(starts, Terms(silence, joining, restarts, least), lines.append)
    return code, [line.strip() for line in lines]


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    handlers = []
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        start = host("a", "done", store=STORE)
        assert run_all([start], Terms(), lambda line: handlers.append(signal.getsignal(signal.SIGHUP))) == 0
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert handlers == [signal.SIG_IGN]


def test_ranks_are_counted_in_the_order_of_the_hosts():
    code, lines = launched(
        host("a", "done", store=STORE, processes=2), host("b", "done", processes=3), host("c", "done")
    )
    assert code == 0
    assert sorted(lines) == [
        "a: round=0 host=0 hosts=3 first=0 ranks=6",
        "b: round=0 host=1 hosts=3 first=2 ranks=6",
        "c: round=0 host=2 hosts=3 first=5 ranks=6",
    ]


def test_the_round_is_the_same_on_every_host_whoever_failed(capfd):
    """torchrun's agents count failures that each has seen itself, so that ranks met in different rounds."""
    code, lines = launched(host("a", "", "done", store=STORE), host("b", "fail 8", "done"), host("c", "", "done"))
    assert code == 0
    assert {line for line in lines if "round=1" in line} == {
        f"{name}: round=1 host={n} hosts=3 first={n} ranks=3" for n, name in enumerate("abc")
    }
    assert "restart 1 of 2, with 3 of 3 hosts" in capfd.readouterr().err


@pytest.mark.parametrize(
    "lost",
    [
        {"rounds": ["fail 8", "done"], "unreached": [1]},
        {"rounds": ["freeze", "done"], "unreached": [1]},
        {"rounds": ["", "done"], "age": 5.0, "unreached": [1]},
    ],
    ids=["cut off", "frozen", "reaches the store no more"],
)
def test_hosts_that_are_left_go_on(lost, capfd):
    code, lines = launched(
        host("a", "", "done", store=STORE), host("b", *lost.pop("rounds"), **lost), host("c", "", "done")
    )
    assert code == 0
    assert [line for line in lines if "round=1" in line and "hosts=2 " in line and "ranks=2" in line]
    assert not [line for line in lines if line.startswith("b: round=1")]
    assert "host b" in capfd.readouterr().err


def test_an_agent_that_died_is_started_again(tmp_path):
    dies = host("a", "exit 137", store=STORE, once=str(tmp_path / "once"))
    code, lines = launched(dies, host("b", "", "done"))
    assert code == 0 and "a: round=1 host=0 hosts=2 first=0 ranks=2" in lines


def test_two_hosts_may_be_lost_at_once():
    code, lines = launched(
        host("a", "", "done", store=STORE), host("b", "exit 9", unreached=[1]),
        host("c", "freeze", unreached=[1]), host("d", "", "done"),
    )  # fmt: skip
    assert code == 0 and "d: round=1 host=1 hosts=2 first=1 ranks=2" in lines


def test_what_cannot_get_better_is_not_tried_again():
    code, lines = launched(host("a", "fail 8", store=STORE), host("b", "fail 3"))
    assert code == 3 and all("round=0" in line for line in lines)


def test_restarts_run_out(capfd):
    code, lines = launched(host("a", *["fail 8"] * 3, store=STORE), host("b", *[""] * 3), restarts=2)
    assert code == 8 and sum(line.startswith("a: ") for line in lines) == 3


def test_the_first_host_is_needed(capfd):
    code, _ = launched(host("a", store=STORE, absent=255), host("b"))
    err = capfd.readouterr().err
    assert code == 8 and "host a does not take part: ssh failed" in err and "the first host, which has the data" in err


def test_as_many_hosts_as_are_asked_for_are_needed(capfd):
    starts = host("a", store=STORE), host("b", absent=1), host("c")
    assert launched(*starts, least=3)[0] == 8
    err = capfd.readouterr().err
    assert "--min-hosts is 3" in err and "host b does not take part: its agent ended with code 1" in err


def test_hosts_that_are_needed_are_waited_for():
    """A cable that was pulled may be plugged in again."""
    starts = host("a", "", "done", store=STORE), host("b", "fail 8", "done", unreached=[1], mended=True)
    code, lines = launched(*starts, least=2)
    assert code == 0 and "b: round=1 host=1 hosts=2 first=1 ranks=2" in lines


def test_a_first_host_that_is_gone_is_waited_for_no_longer_than_the_time_to_join(capfd):
    code, _ = launched(host("a", "fail 8", store=STORE, unreached=[1]), host("b", "", "done"), joining=1.0)
    err = capfd.readouterr().err
    assert code == 8 and "too few hosts: 1 of 2" in err and "the first host, which has the data" in err


def test_joining_is_limited(capfd):
    code, _ = launched(host("a", "done", store=STORE), host("b", "done", unreached=[0]), joining=30)
    err = capfd.readouterr().err
    assert code == 0 and "host b does not take part: no route to host" in err


def test_signals_reach_every_host():
    starts = host("a", "", store=STORE), host("b", "")
    found = []

    def on_line(line):
        found.append(line.strip())
        if sum("round=0" in each for each in found) == 2 and len(found) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    assert run_all(starts, Terms(5.0, 20.0, 2, 1), on_line) == 130
    assert {"a: SIGINT", "b: SIGINT"} <= set(found)


def test_nothing_is_left_running():
    before = threading.active_count()
    launched(host("a", "freeze", store=STORE), host("b", "freeze"), restarts=0)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_a_silent_agent_is_ended_before_the_next_is_started():
    remote = Start("x", ("ssh", "x", "exec env A=1 python -m snugfit._cli.agent"), remote=True)
    assert remote.after(None) == remote.command
    *before, last = remote.after(4711)
    assert before == ["ssh", "x"] and last.endswith("; exec env A=1 python -m snugfit._cli.agent")
    assert last.startswith(f"ps -o args= -p 4711 | grep -q {AGENT} && kill -9 4711")
    assert host("a").after(4711) == host("a").command


@pytest.mark.parametrize(
    "report", [{"said": "ready"}, {"said": "reached", "round": "x"}, {"said": "failed", "codes": 3}, {"said": "beat"}]
)
def test_reports_that_are_none_are_shown(report, capfd):
    member = Member(host("a", "done"), queue.Queue(), "x" * 64, print)
    member.dial()
    try:
        member.hear(0, report)
        assert "a: an invalid report" in capfd.readouterr().err
    finally:
        member.hang_up()


def test_a_program_that_is_missing_is_named():
    with pytest.raises(UsageError, match="cannot run no-such-ssh"):
        launched(Start("x", ("no-such-ssh", "x")))
