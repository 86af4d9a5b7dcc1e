"""``snugfit cluster launch``: a command on several processes or hosts, by torchrun, here or over ssh."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from snugfit._cli.hosts import addresses_of, read_hosts, refuse_public
from snugfit._cli.launcher import Terms, run_all
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

    def terms(self, max_restarts: int, min_hosts: int) -> Terms:
        """How a launch waits and starts again."""
        return Terms(parse_seconds(self.timeout), parse_seconds(self.join_timeout), max_restarts, min_hosts)


HERE = ClusterOptions()


def launch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    where: ClusterOptions = HERE,
    max_restarts: Annotated[int, Range(0, 10**6)] = 3,
    min_hosts: Workers = 1,
) -> int:
    """Start a command of snugfit once per process, by torchrun, on this machine or on hosts over ssh.

    When a process is lost, all are started again from the last checkpoint; when a host is lost, with the remaining
    hosts, as long as the first one is there. Traffic is neither encrypted nor authenticated: for trusted networks.

    For example:

    ```
    snugfit cluster launch --processes 2 -- train --strategy tiled --model vgg16
    snugfit cluster launch --hosts cluster.yaml --dry-run -- train --strategy tiled --model vgg16
    ```

    Args:
        command: command of snugfit with its options, after `--`.
        where: the processes or hosts.
        max_restarts: how often processes are started again after one was lost.
        min_hosts: hosts with which to begin, and to go on.
    """
    if not command:
        raise UsageError("no command; add it after `--`, like `snugfit cluster launch --processes 2 -- train`.")
    terms = where.terms(max_restarts, min_hosts)
    commands = starts(where, terms, ("snugfit", *command))
    if where.dry_run:
        print("\n".join(map(str, commands)))
        return 0
    return run_all(commands, terms)


def starts(where: ClusterOptions, terms: Terms, program: Sequence[str]) -> tuple[Start, ...]:
    """Commands that start a program (a module and its arguments) on all hosts; the first host holds the gateway.

    Raises:
        UsageError: options contradict each other, or an address is public.
    """
    if (where.processes is None) == (where.hosts is None):
        raise UsageError("name the processes: `--processes N` on this machine, or `--hosts cluster.yaml`.")
    return _over_ssh(where, terms, program) if where.hosts else (_on_this_machine(where, terms, program),)


def _on_this_machine(where: ClusterOptions, terms: Terms, program: Sequence[str]) -> Start:
    assert where.processes is not None
    interface = where.interface or LOOPBACK
    addresses = addresses_of(interface)
    refuse_public(addresses, where.public)
    endpoint = f"{addresses[0]}:0"  # any port
    options = ["--serve", endpoint, *_options(terms, where.processes, 1, endpoint)]
    environment = {"GLOO_SOCKET_IFNAME": interface, **_timeouts(where)}
    command = (sys.executable, "-m", AGENT, *options, "--module", *program)
    return Start("localhost", command, environment, where.processes)


def _over_ssh(where: ClusterOptions, terms: Terms, program: Sequence[str]) -> tuple[Start, ...]:
    assert where.hosts is not None
    hosts = read_hosts(where.hosts)
    if terms.min_hosts > len(hosts):
        raise UsageError(f"--min-hosts {terms.min_hosts}, but {where.hosts} names {len(hosts)}.")
    refuse_public([host.address for host in hosts], where.public)
    endpoint = f"{hosts[0].address}:{where.port}"
    commands: list[Start] = []
    for host in hosts:
        options = [] if commands else ["--serve", endpoint]
        options += _options(terms, host.processes, len(hosts), endpoint)
        interface = where.interface or host.interface
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        variables = [f"{name}={value}" for name, value in {**environment, **_timeouts(where)}.items()]
        agent = ["env", *variables, host.python, "-m", AGENT, *options, "--module", *program]
        there = f"cd {shlex.quote(host.directory)} && " if host.directory else ""
        login = f"{host.user}@{host.address}" if host.user else host.address
        command = (*SSH, login, f"{there}exec {shlex.join(agent)}")
        commands.append(Start(host.address, command, processes=host.processes, remote=True))
    return tuple(commands)


def _timeouts(where: ClusterOptions) -> dict[str, str]:
    return {"SNUGFIT_TIMEOUT": where.timeout, "SNUGFIT_JOIN_TIMEOUT": where.join_timeout}


def _options(terms: Terms, processes: int, hosts: int, endpoint: str) -> list[str]:
    values = {
        "--nnodes": f"{terms.min_hosts}:{hosts}",
        "--nproc-per-node": str(processes),
        "--max-restarts": str(terms.max_restarts),
        "--rdzv-backend": "snugfit",
        "--rdzv-id": "snugfit",
        "--rdzv-endpoint": endpoint,
    }
    return [word for pair in values.items() for word in pair]
