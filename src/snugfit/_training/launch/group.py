"""Joining and leaving the group of processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from snugfit._training.launch.network import own_name, use_interface
from snugfit._training.launch.store import Store, connect, host_store, sealed_set, within
from snugfit._training.launch.world import World
from snugfit.errors import SnugfitError, UsageError, WorkerLostError

_GRACE_SECONDS = 2.0


@contextlib.contextmanager
def join(
    here: World,
    timeout_seconds: float | None = None,
    interface: str | None = None,
    *,
    device: str = "cpu",
    join_seconds: float | None = None,
) -> Iterator[dist.ProcessGroup]:
    """Join all processes in a group, which ends with the context, also after errors.

    Args:
        here: this process.
        timeout_seconds: timeout of a collective; that of the launch by default.
        interface: the only network interface to listen on; by default the one that leads to the gateway.
        device: with ``"cuda"``, tensors there go over NCCL and those on the CPU over gloo.
        join_seconds: how long processes wait for each other at the start, because imports and slow disks take time;
            ``--join-timeout`` of the launch by default.

    Raises:
        WorkerLostError: some processes did not join.
        UsageError: this build of torch lacks the requested transport.
    """
    limit = here.timeout_seconds if timeout_seconds is None else timeout_seconds
    patience = here.join_seconds if join_seconds is None else join_seconds
    use_interface(interface, here.addr)
    hosted = host_store(here)
    store = connect(here, patience)
    _wait_for_all(here, store, patience)
    if device.startswith("cuda"):
        torch.cuda.set_device(here.local_rank)
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
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


def _unconnected(here: World, error: RuntimeError) -> SnugfitError:
    if "unsupported gloo device" in str(error):
        return UsageError(
            f"this build of torch has no gloo transport {os.environ.get('GLOO_DEVICE_TRANSPORT')}: "
            "TLS takes a build with USE_GLOO_WITH_OPENSSL.\nUnset GLOO_DEVICE_TRANSPORT, and keep to trusted networks."
        )
    return WorkerLostError(
        f"the {here.size} processes found each other but could not connect: {str(error).splitlines()[0]}\n"
        "Look whether a firewall lies between the hosts, or name the network with --interface."
    )


def _wait_for_all(here: World, store: Store, seconds: float) -> None:
    """Announce this process and wait for all others."""

    def meet() -> None:
        sealed_set(here, store, f"joined/{here.rank}", own_name(here.addr))
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

    def look() -> list[int]:
        return [rank for rank in range(here.size) if not store.check([f"joined/{rank}"])]

    try:
        ranks = within(1.0, look)
    except (RuntimeError, TimeoutError):
        return "rank 0"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
