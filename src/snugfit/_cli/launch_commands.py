"""Command lines that start the processes of a cluster, here or over ssh."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from snugfit._cli.hosts import Host, addresses_of, read_hosts, refuse_public
from snugfit._cli.launcher import Terms
from snugfit._cli.member import AGENT, Start
from snugfit._quantities import parse_seconds
from snugfit.errors import UsageError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SSH = (
    "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
)  # fmt: skip
_PASSED_ON = (
    "GLOO_DEVICE_TRANSPORT", "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY", "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE", "OMP_NUM_THREADS", "SNUGFIT_DATA",
)  # fmt: skip
_ANY_PORT = 0


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
    join_timeout: str = "60s"

    def terms(self) -> Terms:
        """How the launch waits and starts again."""
        return Terms(parse_seconds(self.timeout), parse_seconds(self.join_timeout), self.max_restarts, self.min_hosts)


def starts(wanted: Wanted, program: Sequence[str]) -> tuple[Start, ...]:
    """Commands that start a program on all hosts; the first host's processes hold the gateway.

    Args:
        wanted: what to start where.
        program: module and its arguments.

    Raises:
        UsageError: options contradict each other, or an address is public.
    """
    if (wanted.processes is None) == (wanted.hosts is None):
        raise UsageError("say where: `--processes N` on this machine, or `--hosts cluster.yaml`.")
    return _over_ssh(wanted, program) if wanted.hosts else (_here(wanted, program),)


def _here(wanted: Wanted, program: Sequence[str]) -> Start:
    assert wanted.processes is not None
    interface = wanted.interface or LOOPBACK
    address = addresses_of(interface)[0]
    refuse_public(addresses_of(interface), wanted.public)
    endpoint = f"{address}:{_ANY_PORT}"
    options = ["--serve", endpoint, *_options(wanted, wanted.processes, 1, endpoint)]
    environment = {"GLOO_SOCKET_IFNAME": interface, **_timeouts(wanted)}
    command = (sys.executable, "-m", AGENT, *options, "--module", *program)
    return Start("localhost", command, environment, wanted.processes)


def _over_ssh(wanted: Wanted, program: Sequence[str]) -> tuple[Start, ...]:
    assert wanted.hosts is not None
    hosts = read_hosts(wanted.hosts)
    if wanted.min_hosts > len(hosts):
        raise UsageError(f"--min-hosts {wanted.min_hosts}, but {wanted.hosts} names {len(hosts)}.")
    refuse_public([host.address for host in hosts], wanted.public)
    return tuple(_start_over_ssh(wanted, hosts, number, program) for number in range(len(hosts)))


def _start_over_ssh(wanted: Wanted, hosts: Sequence[Host], number: int, program: Sequence[str]) -> Start:
    host, endpoint = hosts[number], f"{hosts[0].address}:{wanted.port}"
    serve = ["--serve", endpoint] if number == 0 else []
    options = [*serve, *_options(wanted, host.processes, len(hosts), endpoint)]
    interface = wanted.interface or host.interface
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    environment |= _timeouts(wanted)
    variables = [f"{name}={value}" for name, value in environment.items()]
    agent = ["env", *variables, host.python, "-m", AGENT, *options, "--module", *program]
    there = f"cd {shlex.quote(host.directory)} && " if host.directory else ""
    login = f"{host.user}@{host.address}" if host.user else host.address
    command = (*SSH, login, f"{there}exec {shlex.join(agent)}")
    return Start(host.address, command, processes=host.processes, remote=True)


def _timeouts(wanted: Wanted) -> dict[str, str]:
    return {"SNUGFIT_TIMEOUT": wanted.timeout, "SNUGFIT_JOIN_TIMEOUT": wanted.join_timeout}


def _options(wanted: Wanted, processes: int, hosts: int, endpoint: str) -> list[str]:
    return [
        "--nnodes", f"{wanted.min_hosts}:{hosts}", "--nproc-per-node", str(processes),
        "--max-restarts", str(wanted.max_restarts), "--rdzv-backend", "snugfit", "--rdzv-id", "snugfit",
        "--rdzv-endpoint", endpoint,
    ]  # fmt: skip
