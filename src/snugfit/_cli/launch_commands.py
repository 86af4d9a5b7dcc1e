"""Command lines that start the processes of a cluster, here or over ssh."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from snugfit._cli.hosts import Host, addresses_of, read_hosts, refuse_public
from snugfit._cli.launcher import Terms
from snugfit._cli.member import AGENT, Start
from snugfit._core.amounts import parse_seconds
from snugfit._core.options import Range, Seconds, Workers
from snugfit.errors import UsageError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SSH = shlex.split("ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3")
_PASSED_ON = (
    "GLOO_DEVICE_TRANSPORT",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT",
    "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE",
    "OMP_NUM_THREADS",
    "SNUGFIT_DATA",
)
_ANY_PORT = 0


@Parameter(name="*", group=Group("Cluster", sort_key=1))
@dataclass(frozen=True)
class ClusterOptions:
    """Where processes run, and how long they wait for each other.

    Attributes:
        processes: processes on this machine, which listen on its loopback alone.
        hosts: YAML file with a list `hosts`. Each has an `address`, and optionally `user`, `processes` (1), `python`
            (python3), `directory` and `interface`. They are reached by ssh, with keys; the first is the gateway.
        timeout: silence after which a process is lost, like `10s`.
        join_timeout: how long hosts and processes wait for each other at the start, like `60s`.
        interface: network interface to listen on, and no other.
        public: allow a public address. Traffic is neither encrypted nor authenticated.
        port: of the first host, to which the others connect.
        dry_run: print the commands and start nothing.
    """

    processes: Workers | None = None
    hosts: str | None = None
    timeout: Seconds = "10s"
    join_timeout: Seconds = "60s"
    interface: str | None = None
    public: Annotated[bool, Parameter(negative="")] = False
    port: Annotated[int, Range(1, 65_535)] = 29400
    dry_run: Annotated[bool, Parameter(negative="")] = False

    def least(self) -> int:
        """Number of hosts, if all of them must take part."""
        return len(read_hosts(self.hosts)) if self.hosts else 1


@dataclass(frozen=True)
class Launching:
    """A launch: its processes, and how often they are started again.

    Attributes:
        where: the processes or hosts.
        max_restarts: rounds after the first.
        min_hosts: hosts with which to begin, and to go on.
    """

    where: ClusterOptions
    max_restarts: int
    min_hosts: int

    def terms(self) -> Terms:
        """How the launch waits and starts again."""
        timeout, join = parse_seconds(self.where.timeout), parse_seconds(self.where.join_timeout)
        return Terms(timeout, join, self.max_restarts, self.min_hosts)


def starts(launching: Launching, program: Sequence[str]) -> tuple[Start, ...]:
    """Commands that start a program on all hosts; the first host's processes hold the gateway.

    Args:
        launching: what to start where.
        program: module and its arguments.

    Raises:
        UsageError: options contradict each other, or an address is public.
    """
    if (launching.where.processes is None) == (launching.where.hosts is None):
        raise UsageError("name the processes: `--processes N` on this machine, or `--hosts cluster.yaml`.")
    return _over_ssh(launching, program) if launching.where.hosts else (_here(launching, program),)


def _here(launching: Launching, program: Sequence[str]) -> Start:
    assert launching.where.processes is not None
    interface = launching.where.interface or LOOPBACK
    address = addresses_of(interface)[0]
    refuse_public(addresses_of(interface), launching.where.public)
    endpoint = f"{address}:{_ANY_PORT}"
    options = ["--serve", endpoint, *_options(launching, launching.where.processes, 1, endpoint)]
    environment = {"GLOO_SOCKET_IFNAME": interface, **_timeouts(launching.where)}
    command = (sys.executable, "-m", AGENT, *options, "--module", *program)
    return Start("localhost", command, environment, launching.where.processes)


def _over_ssh(launching: Launching, program: Sequence[str]) -> tuple[Start, ...]:
    assert launching.where.hosts is not None
    hosts = read_hosts(launching.where.hosts)
    if launching.min_hosts > len(hosts):
        raise UsageError(f"--min-hosts {launching.min_hosts}, but {launching.where.hosts} names {len(hosts)}.")
    refuse_public([host.address for host in hosts], launching.where.public)
    return tuple(_start_over_ssh(launching, hosts, number, program) for number in range(len(hosts)))


def _start_over_ssh(launching: Launching, hosts: Sequence[Host], number: int, program: Sequence[str]) -> Start:
    host, endpoint = hosts[number], f"{hosts[0].address}:{launching.where.port}"
    serve = ["--serve", endpoint] if number == 0 else []
    options = [*serve, *_options(launching, host.processes, len(hosts), endpoint)]
    interface = launching.where.interface or host.interface
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    environment |= _timeouts(launching.where)
    variables = [f"{name}={value}" for name, value in environment.items()]
    agent = ["env", *variables, host.python, "-m", AGENT, *options, "--module", *program]
    there = f"cd {shlex.quote(host.directory)} && " if host.directory else ""
    login = f"{host.user}@{host.address}" if host.user else host.address
    command = (*SSH, login, f"{there}exec {shlex.join(agent)}")
    return Start(host.address, command, processes=host.processes, remote=True)


def _timeouts(where: ClusterOptions) -> dict[str, str]:
    return {"SNUGFIT_TIMEOUT": where.timeout, "SNUGFIT_JOIN_TIMEOUT": where.join_timeout}


def _options(launching: Launching, processes: int, hosts: int, endpoint: str) -> list[str]:
    values = {
        "--nnodes": f"{launching.min_hosts}:{hosts}",
        "--nproc-per-node": str(processes),
        "--max-restarts": str(launching.max_restarts),
        "--rdzv-backend": "snugfit",
        "--rdzv-id": "snugfit",
        "--rdzv-endpoint": endpoint,
    }
    return [word for pair in values.items() for word in pair]
