"""Who a process is, by the variables of torchrun."""

import dataclasses
import socket
import time

import pytest

from snugfit.core.hardware import cores
from snugfit.errors import SnugfitError, UsageError, WorkerLostError
from snugfit.training.launch import World, join, share_of_threads, world
from snugfit.training.launch.network import interface_towards, own_address
from snugfit.training.launch.store import listen, within

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip


def test_a_process_of_torchrun():
    found = world(TORCHRUN)
    assert found == World(3, 4, 1, 2, restarts=2, addr="10.0.0.1", port=29400, max_restarts=3, run_id="x")
    assert not found.is_gateway


def test_a_process_alone():
    assert world({}) is None
    assert world({"MASTER_ADDR": "10.0.0.1"}) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT is '-1'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        ({"LOCAL_RANK": "", "MASTER_ADDR": ""}, "LOCAL_RANK, MASTER_ADDR not set"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"LOCAL_WORLD_SIZE": "8"}, "local rank 1 of 8"),
    ],
)
def test_half_a_torchrun_is_refused(changed, words):
    with pytest.raises(UsageError, match=r"snugfit cluster launch|port is between") as caught:
        world({**TORCHRUN, **changed})
    assert words in str(caught.value)


def test_threads_are_shared_by_the_processes_of_a_host():
    two = world(TORCHRUN)
    assert share_of_threads(None) is None and share_of_threads(two, 5) == 5
    assert share_of_threads(two) == max(1, cores() // 2)
    assert share_of_threads(dataclasses.replace(two, local_size=1000)) == 1


def test_the_interface_that_leads_somewhere():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert interface_towards("127.0.0.1").startswith("lo")
    assert interface_towards("x" * 64) is None


def test_the_store_listens_on_the_gateways_address_alone():
    with listen("127.0.0.1", 0) as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(SnugfitError, match=f"cannot listen on 127.0.0.1 port {port}"):
            listen("127.0.0.1", port)


def test_a_process_that_never_comes_is_named(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = World(0, 3, 0, 3, 0, "127.0.0.1", port)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(WorkerLostError, match="ranks 1, 2 did not join within 1 s"), join(here, join_seconds=1):
        pass


def test_no_wait_is_without_a_limit():
    with pytest.raises(TimeoutError):
        within(0.1, lambda: time.sleep(30))
    with pytest.raises(ZeroDivisionError):
        within(1, lambda: 1 // 0)
    assert within(1, lambda: 7) == 7
