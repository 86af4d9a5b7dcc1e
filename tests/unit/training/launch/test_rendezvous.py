"""A host's side of a round: what it answers, and when its workers start and stop."""

import queue
import socket
import threading
import time

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from snugfit._training.launch.rendezvous import Reach, Rendezvous


class Line:
    """The launcher's line, without a launcher."""

    def __init__(self, *orders):
        self.ended, self.heard, self.told = threading.Event(), time.monotonic(), []
        self._orders = queue.Queue()
        for order in orders:
            self._orders.put(order)

    def next_order(self, patience):
        if self._orders.empty():
            self.ended.set()
            return None
        return self._orders.get()

    def pending(self):
        return not self._orders.empty()

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


def test_a_round_begins_after_the_store_was_reached(store):
    where = f"127.0.0.1:{store.port}"
    assigned = {"order": "round", "round": 4, "host": 1, "hosts": 3, "first": 2, "ranks": 7, "store": where}
    line = Line({"order": "probe", "round": 4, "store": where}, assigned)
    rendezvous = Rendezvous(line, Reach(5.0), "x")
    assert rendezvous.num_nodes_waiting() == 1, "for which torchrun stops the workers"
    found = rendezvous.next_rendezvous()
    assert line.told == [{"said": "reached", "round": 4, "ok": True, "why": None}]
    assert (found.rank, found.world_size) == (1, 3)
    assert (found.bootstrap_store_info.master_addr, found.bootstrap_store_info.master_port) == ("127.0.0.1", store.port)
    assert (rendezvous.round, rendezvous.first_rank, rendezvous.ranks) == (4, 2, 7)
    assert rendezvous.num_nodes_waiting() == 0 and rendezvous.use_agent_store


def test_a_host_that_is_cut_off_says_so_and_waits(silent):
    line = Line({"order": "probe", "round": 2, "store": silent})
    with pytest.raises(RendezvousClosedError):
        Rendezvous(line, Reach(0.3), "x").next_rendezvous()
    assert line.told[0]["ok"] is False and line.told[0]["why"]
    assert line.ended.is_set()


def test_a_host_without_work_ends_when_the_launcher_is_gone(monkeypatch):
    line = Line()
    monkeypatch.setattr(line, "next_order", lambda patience: None)
    line.heard -= 1000
    with pytest.raises(RendezvousClosedError, match="gone"):
        Rendezvous(line, Reach(1.0), "x").next_rendezvous()
