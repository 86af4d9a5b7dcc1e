"""The store in which processes meet, on the gateway's address only; messages in it are authenticated.

torch's store has no passwords, so a message carries a code that only members of the launch can make.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from snugfit._training.launch.world import World
from snugfit.errors import SnugfitError, WorkerLostError

T = TypeVar("T")
_POLL_SECONDS = 0.5


def seal(secret: str, key: str, text: str) -> str:
    """A text with a code that authenticates its writer and its key: HMAC-SHA256 in hexadecimal, then the text."""
    return f"{_code(secret, key, text)}{text}"


def unseal(secret: str, key: str, sealed: str) -> str:
    """Check a sealed text and return the text.

    Raises:
        WorkerLostError: it was written without the secret, or for another key.
    """
    length = 2 * hashlib.sha256().digest_size
    code, text = sealed[:length], sealed[length:]
    if not hmac.compare_digest(code.encode(), _code(secret, key, text).encode()):
        raise WorkerLostError(
            f"'{key}' in the store was not written by this launch and is ignored.\n"
            "Check who can reach the network of the hosts, and resume the run on a network that you trust."
        )
    return text


def _code(secret: str, key: str, text: str) -> str:
    return hmac.new(secret.encode(), f"{len(key)}:{key}{text}".encode(), hashlib.sha256).hexdigest()


def host_store(here: World) -> TCPStore | None:
    """Start the store on the gateway; None on all others, and if an agent hosts it."""
    if not here.is_gateway or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return serve(here.addr, here.port)


def await_name(address: str, seconds: float) -> None:
    """Wait so many seconds at most until a host's name is known: Kubernetes starts a host before its name spreads."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            socket.getaddrinfo(address, None)
            return
        except socket.gaierror:
            time.sleep(_POLL_SECONDS)


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens on one address only."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        raise SnugfitError(
            f"cannot listen on {address} port {port}: {error.strerror or error}.\n"
            "Name an address of the first host, or another port."
        ) from error


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Address and port of ``ADDRESS:PORT``; an IPv6 address is in brackets."""
    address, _, port = endpoint.rpartition(":")
    return address.strip("[]"), int(port)


def dial(address: str, port: int, seconds: float) -> TCPStore:
    """A connection to a store; with a timeout in seconds, which torch does not always keep."""
    limit = timedelta(seconds=seconds)
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)


def serve(address: str, port: int) -> TCPStore:
    """A store that listens on one address only, by default torch listens on all of the host; port 0 is any free one.

    Raises:
        SnugfitError: the address is not this host's, or the port is taken.
    """
    listener = _listen(address, port)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(here: World, seconds: float) -> Store:
    """A separate connection to the store of this launch and restart.

    Raises:
        WorkerLostError: the gateway did not answer in time.
    """
    try:
        store = within(seconds, lambda: dial(here.addr, here.port, seconds))
    except (RuntimeError, TimeoutError) as error:
        raise WorkerLostError(
            f"rank 0 on {here.addr} does not answer within {seconds:g} s, so that rank {here.rank} cannot join.\n"
            "Look whether its process runs, and whether a firewall lies between the hosts."
        ) from error
    return PrefixStore(f"snugfit/{here.run_id}/{here.restarts}", store)


def sealed_set(here: World, store: Store, key: str, text: str) -> None:
    """Write a message that only a member of the launch can have written."""
    store.set(key, seal(here.secret, _named(here, key), text))


def sealed_get(here: World, store: Store, key: str) -> str:
    """Wait for such a message and read it; raises WorkerLostError if another program wrote it."""
    return unseal(here.secret, _named(here, key), store.get(key).decode(errors="replace"))


def _named(here: World, key: str) -> str:
    return f"{here.run_id}/{here.restarts}/{key}"


def names(here: World, store: Store, seconds: float) -> dict[int, str]:
    """Process and host of every rank that has joined, as text.

    Raises:
        WorkerLostError: the gateway does not answer.
    """
    try:
        return within(seconds, lambda: {rank: sealed_get(here, store, f"joined/{rank}") for rank in range(here.size)})
    except (RuntimeError, TimeoutError) as error:
        raise WorkerLostError(
            f"rank 0 on {here.addr} stopped answering while the processes joined.\n"
            "Look at the output of its process, and start again."
        ) from error


def within(seconds: float, work: Callable[[], T]) -> T:
    """Run work that may block in native code, with a timeout in seconds, and return its result.

    Raises:
        TimeoutError: it was not done in time; its thread is left behind.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            failed.append(error)

    worker = threading.Thread(target=run, name="snugfit-limited", daemon=True)
    worker.start()
    worker.join(seconds + 1)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"not done within {seconds:g} s")
    return found[0]
