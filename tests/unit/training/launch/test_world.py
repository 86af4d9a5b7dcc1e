"""Who a process is, by the variables of torchrun."""

import contextlib
import dataclasses
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from snugfit._core.hardware import cores
from snugfit._training.launch import World, group, join, share_of_threads, world
from snugfit._training.launch.group import interface_towards, own_address, unique_names
from snugfit._training.launch.store import await_name, serve, within
from snugfit.errors import SnugfitError, UsageError, WorkerLostError

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
        ({"MASTER_PORT": "", "MASTER_ADDR": ""}, "MASTER_ADDR, MASTER_PORT not set"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"LOCAL_WORLD_SIZE": "8"}, "local rank 1 of 8"),
    ],
)
def test_half_a_torchrun_is_refused(changed, words):
    with pytest.raises(UsageError, match=r"snugfit cluster launch|port is between") as caught:
        world({**TORCHRUN, **changed})
    assert words in str(caught.value)


def test_only_rank_and_size_are_needed():
    """As MPI and SLURM scripts give them: one process a host then."""
    given = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    found = world(given)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.restarts) == (3, 4, 0, 1, 0)


@pytest.mark.parametrize(
    ("text", "launched", "threads"),
    [
        ("3", True, 3), ("3", False, 3), ("1", True, 1), ("4,2", True, 4),
        ("1", False, max(1, cores() // 2)),  # torchrun's own, where the user wrote nothing
        ("", True, max(1, cores() // 2)), ("many", True, max(1, cores() // 2)), ("0", True, max(1, cores() // 2)),
    ],
)  # fmt: skip
def test_omp_num_threads_is_honoured(text, launched, threads):
    given = {**TORCHRUN, "OMP_NUM_THREADS": text, **({"SNUGFIT_SECRET": "x"} if launched else {})}
    assert share_of_threads(world(given)) == threads
    assert share_of_threads(world(given), 7) == 7, "--threads precedes it"


def test_the_time_to_join_is_an_option():
    assert world({**TORCHRUN, "SNUGFIT_JOIN_TIMEOUT": "2min"}).join_seconds == 120
    assert world(TORCHRUN).join_seconds == 60


def test_hosts_of_one_name_are_told_apart():
    hosts = [("pi", "10.0.0.1"), ("pi", "10.0.0.2"), ("pi", "10.0.0.2"), ("nano", "10.0.0.3")]
    assert unique_names(hosts) == ["pi (10.0.0.1)", "pi (10.0.0.2)", "pi (10.0.0.2)", "nano"]
    assert unique_names([("pi", ""), ("pi", "")]) == ["pi", "pi"], "processes of one machine"


def test_a_secret_is_not_shown():
    assert "hush" not in repr(world({**TORCHRUN, "SNUGFIT_SECRET": "hush"}))


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
    store = serve("127.0.0.1", 0)
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    assert [each.ip for each in listening if each.port == store.port] == ["127.0.0.1"]
    with pytest.raises(SnugfitError, match=f"cannot listen on 127.0.0.1 port {store.port}"):
        serve("127.0.0.1", store.port)


def test_a_name_that_has_not_spread_yet_is_waited_for(monkeypatch):
    asked = []

    def unknown_twice(name, port):
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown_twice)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    await_name("job-node-0-0.job", 60.0)
    assert asked == ["job-node-0-0.job"] * 3
    await_name("job-node-0-0.job", 0.0)
    assert len(asked) == 3, "no time is left"


def test_a_process_that_never_comes_is_named(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = World(0, 3, 0, 3, 0, "127.0.0.1", port, join_seconds=1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(WorkerLostError, match="ranks 1, 2 did not join within 1 s"), join(here):
        pass


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:0", "cpu:gloo,cuda:nccl")])
def test_all_take_the_device_of_the_gateway(monkeypatch, device, backend):
    backends, chosen, both = [], [], threading.Barrier(2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(group, "_use_device", chosen.append)

    def stop(backend, **others):
        backends.append(backend)
        both.wait(10)
        raise RuntimeError("enough")

    monkeypatch.setattr(group.dist, "init_process_group", stop)

    def take_part(rank):
        here = World(rank, 2, rank, 2, 0, "127.0.0.1", port, join_seconds=10, secret="hush")
        with contextlib.suppress(WorkerLostError), join(here, device=device if rank == 0 else "mps"):
            pass

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take_part, range(2)))
    assert (backends, sorted(chosen)) == ([backend] * 2, [0, 1] if "cuda" in device else [])


def test_no_wait_is_without_a_limit():
    with pytest.raises(TimeoutError):
        within(0.1, lambda: time.sleep(30))
    with pytest.raises(ZeroDivisionError):
        within(1, lambda: 1 // 0)
    assert within(1, lambda: 7) == 7
