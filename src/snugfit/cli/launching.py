"""Command lines that start the processes of a cluster, here or over ssh, and running them."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from snugfit.cli.hosts import Host, addresses_of, read_hosts, refuse_public
from snugfit.errors import UsageError, WorkerLostError

AGENT = "snugfit.cli.agent"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SSH = (
    "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
)  # fmt: skip
SSH_FAILED = 255
_GRACE_SECONDS = 15.0
_PASSED_ON = (
    "GLOO_DEVICE_TRANSPORT", "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY", "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE", "OMP_NUM_THREADS", "SNUGFIT_DATA",
)  # fmt: skip
_MEETING = "join_timeout=120,close_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=5,read_timeout=30"


@dataclass(frozen=True)
class Start:
    """One command that starts the processes of a host.

    Attributes:
        host: its address.
        command: arguments, the program first.
        environment: variables beside those of this process.
    """

    host: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As one would type it."""
        return (
            " ".join([f"{name}={shlex.quote(value)}" for name, value in self.environment.items()])
            + (" " if self.environment else "")
            + shlex.join(self.command)
        )


@dataclass(frozen=True)
class Wanted:
    """What to start where; see the options of ``snugfit cluster launch``."""

    processes: int | None
    hosts: str | None
    max_restarts: int
    timeout: str
    interface: str | None
    public: bool
    min_hosts: int
    port: int


def starts(wanted: Wanted, program: Sequence[str], folder: str) -> tuple[Start, ...]:
    """Commands that start a program on all hosts; the first host's processes hold the gateway.

    Args:
        wanted: what to start where.
        program: module and its arguments.
        folder: an empty one in which processes of this machine may meet.

    Raises:
        UsageError: options contradict each other, or an address is public.
    """
    if (wanted.processes is None) == (wanted.hosts is None):
        raise UsageError("say where: `--processes N` on this machine, or `--hosts cluster.yaml`.")
    return _over_ssh(wanted, program) if wanted.hosts else (_here(wanted, program, folder),)


def _here(wanted: Wanted, program: Sequence[str], folder: str) -> Start:
    assert wanted.processes is not None
    interface = wanted.interface or LOOPBACK
    address = addresses_of(interface)[0]
    refuse_public(addresses_of(interface), wanted.public)
    meeting = ["--rdzv-endpoint", f"{folder}/meeting", "--rdzv-conf", f"store_type=file,last_call_timeout=1,{_MEETING}"]
    options = ["--nnodes", "1", *_options(wanted, wanted.processes), "--local-addr", address, *meeting]
    environment = {"GLOO_SOCKET_IFNAME": interface, "SNUGFIT_TIMEOUT": wanted.timeout}
    return Start("localhost", (sys.executable, "-m", AGENT, *options, "--module", *program), environment)


def _over_ssh(wanted: Wanted, program: Sequence[str]) -> tuple[Start, ...]:
    assert wanted.hosts is not None
    hosts = read_hosts(wanted.hosts)
    if wanted.min_hosts > len(hosts):
        raise UsageError(f"--min-hosts {wanted.min_hosts}, but {wanted.hosts} names {len(hosts)}.")
    refuse_public([host.address for host in hosts], wanted.public)
    return tuple(_start_over_ssh(wanted, hosts, number, program) for number in range(len(hosts)))


def _start_over_ssh(wanted: Wanted, hosts: Sequence[Host], number: int, program: Sequence[str]) -> Start:
    """Start one host; torch numbers hosts as their local addresses are sorted, hence the tilde of all but the first."""
    host, endpoint = hosts[number], f"{hosts[0].address}:{wanted.port}"
    meeting = ["--rdzv-endpoint", endpoint, "--rdzv-conf", f"is_host=0,last_call_timeout=15,{_MEETING}"]
    local = host.address if number == 0 else f"~{number:04d}-{host.address}"
    serve = ["--serve", endpoint] if number == 0 else []
    options = ["--nnodes", f"{wanted.min_hosts}:{len(hosts)}", *_options(wanted, host.processes), "--local-addr", local]
    interface = wanted.interface or host.interface
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    environment |= {"SNUGFIT_TIMEOUT": wanted.timeout}
    variables = [f"{name}={value}" for name, value in environment.items()]
    agent = ["env", *variables, host.python, "-m", AGENT, *serve, *options, *meeting, "--module", *program]
    there = f"cd {shlex.quote(host.directory)} && " if host.directory else ""
    login = f"{host.user}@{host.address}" if host.user else host.address
    return Start(host.address, (*SSH, login, f"{there}exec {shlex.join(agent)}"))


def _options(wanted: Wanted, processes: int) -> list[str]:
    return [
        "--nproc-per-node", str(processes), "--max-restarts", str(wanted.max_restarts), "--rdzv-backend", "c10d",
        "--rdzv-id", "snugfit",
    ]  # fmt: skip


def run_all(commands: Sequence[Start], on_line: Callable[[str], None] | None = None) -> int:
    """Run the commands until all have ended; Ctrl-C and the like reach every process of every host.

    Args:
        commands: of all hosts.
        on_line: called with every line that they print on stdout; stdout is theirs otherwise.

    Returns:
        Exit code: 0 where the first host's is, else that of the rank that failed.
    """
    running = [_started(each, on_line is not None) for each in commands]
    readers = [threading.Thread(target=_read, args=(process.stdout, on_line)) for process in running if on_line]
    with _signals_to(running):
        for reader in readers:
            reader.start()
        codes = _wait(running)
        for reader in readers:
            reader.join()
    for start, code in zip(commands, codes, strict=True):
        if code == SSH_FAILED:
            print(f"host {start.host}: ssh failed, or the connection broke.", file=sys.stderr)
    return _verdict(codes)


def _wait(running: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Wait for the first host, which alone has the results; then not much longer for hosts that were cut off."""
    first, *others = running
    codes = [first.wait()]
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in others:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        codes.append(process.wait())
    return codes


def _verdict(codes: Sequence[int]) -> int:
    lost = WorkerLostError.exit_code
    if codes[0] == 0:
        return 0
    found = [lost if code < 0 or code == SSH_FAILED else code for code in codes]
    return next((code for code in found if code not in (0, lost)), lost)


def _started(start: Start, captured: bool) -> subprocess.Popen[str]:
    return subprocess.Popen(
        start.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if captured else None, text=True,
        env={**os.environ, **start.environment}, start_new_session=True,
    )  # fmt: skip


def _read(stream: IO[str], on_line: Callable[[str], None]) -> None:
    for line in stream:
        on_line(line)


@contextlib.contextmanager
def _signals_to(running: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """Tell signals to the agents through their stdin, which ssh carries to other hosts."""

    def tell(number: int, frame: object) -> None:
        name = "SIGINT" if number == signal.SIGINT else "SIGTERM"
        for process in running:
            with contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.write(name + "\n")
                process.stdin.flush()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, tell) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for process in running:
            if process.poll() is None:
                process.terminate()
