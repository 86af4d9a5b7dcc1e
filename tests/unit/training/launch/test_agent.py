"""A host's side of a round: what it answers, and when its workers start and stop."""

import json
import queue
import signal
import socket
import sys
import threading
import time

import pytest
from torch.distributed import TCPStore

from snugfit._training.launch import world
from snugfit._training.launch.agent import Agent, Reach


class Line:
    """The launcher's line, without a launcher."""

    def __init__(self, *orders):
        self.ended, self.heard, self.told = threading.Event(), time.monotonic(), []
        self._orders = queue.Queue()
        for order in orders:
            self._orders.put(order)

    def next_order(self, patience):
        try:
            return self._orders.get(timeout=patience)
        except queue.Empty:
            return None

    def tell(self, said, **more):
        self.told.append({"said": said, **more})


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def silent():
    """A port that takes connections and never answers, like a host that was frozen."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_store_is_reached_over_the_network_and_asked_again(store):
    reach = Reach(5.0)
    assert reach.age() is None
    assert reach.probe(f"127.0.0.1:{store.port}") is None
    asked = store.add("reach", 0)
    deadline = time.monotonic() + 10
    while store.add("reach", 0) <= asked and time.monotonic() < deadline:
        time.sleep(0.05)
    assert store.add("reach", 0) > asked and reach.age() < 5
    assert not [key for key in store.list_keys() if "probe" in key], "what was sent is removed"


def test_a_store_that_does_not_answer_is_given_up(silent):
    reach = Reach(0.5)
    assert reach.probe(silent) and reach.age() is None


COMMAND = [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['RANK']) - 2)"]
"""Processes of ranks 2 and 3: the first succeeds, the second fails with 1."""


def assigned(store, first=2):
    return {"order": "round", "round": 4, "host": 1, "hosts": 3, "first": first, "ranks": 7, "store": store}


def run(line, command=COMMAND, processes=2):
    agent = Agent(line, Reach(5.0), command, processes, max_restarts=9)
    thread, found = threading.Thread(target=lambda: found.append(agent.run())), []
    thread.start()
    return agent, thread, found


def wait_for(line, said):
    deadline = time.monotonic() + 30
    while not [each for each in line.told if each["said"] == said]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [each for each in line.told if each["said"] == said]


def test_a_round_begins_after_the_store_was_reached(store, tmp_path):
    where = f"127.0.0.1:{store.port}"
    line = Line({"order": "probe", "round": 4, "store": where}, assigned(where))
    write = "import json, os; json.dump(dict(os.environ), open(os.environ['LOCAL_RANK'], 'w'))"
    _, thread, found = run(line, [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {write}"])
    wait_for(line, "done")
    line.ended.set()
    thread.join()
    assert found == [True], "the processes have finished"
    assert line.told == [{"said": "reached", "round": 4, "ok": True, "why": None}, {"said": "done"}]
    for local_rank in range(2):
        here = world(json.loads((tmp_path / str(local_rank)).read_text()))
        assert (here.rank, here.size, here.local_rank, here.local_size) == (2 + local_rank, 7, local_rank, 2)
        assert (here.restarts, here.max_restarts, here.addr, here.port) == (4, 9, "127.0.0.1", store.port)


def test_processes_that_fail_are_reported_and_the_others_ended(store):
    line = Line(assigned(f"127.0.0.1:{store.port}"))
    _, thread, found = run(line)
    assert wait_for(line, "failed") == [{"said": "failed", "codes": [1]}]
    line.ended.set()
    thread.join()
    assert found == [False] and not [each for each in line.told if each["said"] == "done"]


def test_a_new_order_kills_the_processes_of_the_round(store):
    where = f"127.0.0.1:{store.port}"
    line = Line(assigned(where))
    agent, thread, found = run(line, [sys.executable, "-c", "import time; time.sleep(600)"])
    deadline = time.monotonic() + 30
    while len(agent._workers) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = list(agent._workers)
    line._orders.put({"order": "probe", "round": 5, "store": where})
    wait_for(line, "reached")
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL] * 2
    line.ended.set()
    thread.join()
    assert found == [False]


def test_a_host_that_is_cut_off_says_so_and_waits(silent):
    line = Line({"order": "probe", "round": 2, "store": silent})
    agent = Agent(line, Reach(0.3), COMMAND)
    threading.Timer(3.0, line.ended.set).start()
    assert not agent.run()
    assert line.told[0]["ok"] is False and line.told[0]["why"]


def test_a_host_without_work_ends_when_the_launcher_is_gone():
    line = Line()
    line.heard -= 1000
    assert not Agent(line, Reach(1.0), COMMAND).run()
    assert not line.ended.is_set()
