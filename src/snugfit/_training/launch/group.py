"""Joining and leaving the group of processes, and this host's names in it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store

from snugfit._training.launch.store import await_name, connect, host_store, sealed_get, sealed_set, within
from snugfit._training.launch.world import World
from snugfit.errors import SnugfitError, UsageError, WorkerLostError, first_line

_GRACE_SECONDS = 2.0
_ANY_PORT = 9
_DEVICE = "device"


@contextlib.contextmanager
def join(here: World, timeout_seconds: float | None = None, *, device: str = "cpu") -> Iterator[dist.ProcessGroup]:
    """Join all processes in a group, which ends with the context, also after errors.

    The timeout is that of a collective, by default the launch's. The device is that of the gateway, whatever others
    give. If it is ``"cuda"``, tensors there go over NCCL and those on the CPU over gloo.

    Raises:
        WorkerLostError: some processes did not join.
        UsageError: this build of torch lacks the requested transport.
    """
    limit = here.timeout_seconds if timeout_seconds is None else timeout_seconds
    await_name(here.addr, here.join_seconds)
    _use_interface(here.addr)
    hosted = host_store(here)
    store = connect(here, here.join_seconds)
    if here.is_gateway:
        sealed_set(here, store, _DEVICE, device)
    _wait_for_all(here, store)
    backend = _backend(here, store)
    try:
        dist.init_process_group(
            backend, store=store, rank=here.rank, world_size=here.size, timeout=timedelta(seconds=limit)
        )
    except RuntimeError as error:
        raise _unconnected(here, error) from error
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        with contextlib.suppress(RuntimeError, TimeoutError):
            within(limit + _GRACE_SECONDS, dist.destroy_process_group)
        del store, hosted


def _backend(here: World, store: Store) -> str:
    """The transports for the gateway's device; if that is a GPU, this process chooses its own."""
    try:
        device = sealed_get(here, store, _DEVICE)
    except RuntimeError as error:
        raise _unconnected(here, error) from error
    if not device.startswith("cuda"):
        return "gloo"
    _use_device(here.local_rank)
    return "cpu:gloo,cuda:nccl"


def gateway_device(here: World) -> str:
    """The device with which the gateway has joined; raises WorkerLostError if it does not answer."""
    return sealed_get(here, connect(here, here.timeout_seconds), _DEVICE)


def _use_device(local_rank: int) -> None:
    """Choose the device of that number, or the only visible one: ``--gpus-per-task`` of Slurm shows a task its own."""
    count = torch.cuda.device_count()
    if not count:
        raise UsageError("the first process trains on a CUDA device, and this machine has none; use --device cpu.")
    torch.cuda.set_device(0 if count == 1 else local_rank)


def _unconnected(here: World, error: RuntimeError) -> SnugfitError:
    if "unsupported gloo device" in str(error):
        return UsageError(
            f"this build of torch has no gloo transport {os.environ.get('GLOO_DEVICE_TRANSPORT')}: "
            "TLS takes a build with USE_GLOO_WITH_OPENSSL.\nUnset GLOO_DEVICE_TRANSPORT, and keep to trusted networks."
        )
    return WorkerLostError(
        f"the {here.size} processes found each other but could not connect: {first_line(error)}\n"
        "Look whether a firewall lies between the hosts, or name the network with --interface."
    )


def _wait_for_all(here: World, store: Store) -> None:
    """Announce this process and wait for all others."""
    seconds = here.join_seconds

    def meet() -> None:
        sealed_set(here, store, f"joined/{here.rank}", _own_name(here.addr))
        store.wait([f"joined/{rank}" for rank in range(here.size)], timedelta(seconds=seconds))

    try:
        within(seconds, meet)
    except (RuntimeError, TimeoutError) as error:
        raise WorkerLostError(
            f"{_absent(here, store)} did not join within {seconds:g} s, and nothing was started.\n"
            "Check the output of that process, and firewalls between the hosts."
        ) from error


def _absent(here: World, store: Store) -> str:
    """The ranks that have not announced themselves, as text."""
    try:
        ranks = within(1.0, lambda: [rank for rank in range(here.size) if not store.check([f"joined/{rank}"])])
    except (RuntimeError, TimeoutError):
        return "rank 0"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def interface_towards(address: str) -> str | None:
    """Name of the interface through which this host reaches an address; None if it is unknown. Nothing is sent."""
    import psutil  # 0.6 MB, and most runs have one process

    own = own_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return name
    return None


def own_address(towards: str) -> str | None:
    """This host's own address on the route to another one; None without a route."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(towards, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None


def _use_interface(gateway: str) -> None:
    """Let gloo and NCCL listen on ``GLOO_SOCKET_IFNAME`` only, or the interface that leads to the gateway."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(gateway)
    if chosen:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = chosen


def _own_name(gateway: str) -> str:
    """This process as text, like ``process 4711 on nano-2, 10.0.0.3``."""
    name, address = own_host(gateway)
    return f"process {os.getpid()} on {name}" + (f", {address}" if address else "")


def own_host(gateway: str) -> tuple[str, str]:
    """Name and address of this host; the address is empty if all processes are on the gateway's host."""
    address = own_address(gateway)
    local = address is None or address.startswith("127.") or address == "::1"
    return socket.gethostname(), "" if address is None or local else address


def unique_names(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """A unique name for each host: its own, with its address if another host has the same name."""
    return [
        f"{name} ({address})" if address and any(n == name and a != address for n, a in hosts) else name
        for name, address in hosts
    ]
