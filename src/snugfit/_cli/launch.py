"""``snugfit cluster launch``: a command on several processes, by torchrun, here or on the hosts of a file over ssh."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter

from snugfit._cli.launcher import Terms, run_all
from snugfit._cli.member import AGENT, Start
from snugfit._core.amounts import parse_seconds
from snugfit._core.options import Common, Range, Seconds, Workers
from snugfit._core.yaml_text import read_yaml
from snugfit.errors import UnknownNameError, UsageError

EXAMPLE = "hosts: [{address: 10.0.0.1}, {address: 10.0.0.2}]"
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


@dataclass(frozen=True)
class Host:
    """A machine that is reached by ssh, at a name or address at which the other hosts reach it too.

    ``python`` is the interpreter that has snugfit; it runs in ``directory``, the home of the user by default, and
    listens on ``interface``, by default that which leads to the first host.
    """

    address: str
    user: str | None = None
    processes: int = 1
    python: str = "python3"
    directory: str | None = None
    interface: str | None = None


def read_hosts(path: str) -> tuple[Host, ...]:
    """Read the hosts of a file; the first is the gateway.

    Raises:
        UsageError: the file cannot be read, or has another form.
        UnknownNameError: a host has an option that does not exist.
    """
    content = read_yaml(path, UsageError, f"--hosts takes a list of hosts, like {EXAMPLE}.")
    entries = content.get("hosts") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"the hosts file {path} must hold a list of hosts, like:\n{EXAMPLE}")
    hosts = tuple(_host(entry, path) for entry in entries)
    addresses = [host.address for host in hosts]
    if len(set(addresses)) < len(addresses):
        raise UsageError(f"a host appears twice in {path}; give it more `processes` instead.")
    return hosts


def _host(entry: Any, path: str) -> Host:
    if isinstance(entry, str):
        entry = {"address": entry}
    kinds = {field.name: int if field.name == "processes" else str for field in dataclasses.fields(Host)}
    if not isinstance(entry, dict) or "address" not in entry:
        raise UsageError(f"each host in {path} needs an address, like:\n{EXAMPLE}")
    for name, value in entry.items():
        if name not in kinds:
            raise UnknownNameError("option of a host", str(name), kinds)
        is_option = name in {"address", "user"} and str(value).startswith("-")
        if type(value) is not kinds[name] or not value or "\0" in str(value) or is_option:
            raise UsageError(f"'{name}: {value}' in {path} is no {'count from 1' if kinds[name] is int else 'text'}.")
    host = Host(**entry)
    if host.processes < 1:
        raise UsageError(f"'processes: {host.processes}' in {path}; a host has one process or more.")
    return host


def refuse_public(addresses: list[str], public: bool) -> None:
    """Refuse to listen on a public address: traffic is neither encrypted nor authenticated.

    Raises:
        UsageError: one is public, or cannot be resolved.
    """
    for address in addresses:
        found = next((each for each in _resolve(address) if ipaddress.ip_address(each).is_global), None)
        if found and not public:
            raise UsageError(
                f"{address} ({found}) is a public address, and traffic between processes is neither encrypted nor "
                "authenticated.\nUse a private network or a VPN; --public allows it."
            )


def _resolve(address: str) -> list[str]:
    try:
        return [str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(address, None)]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot find the address of the host '{address}': {reason}.") from error


def addresses_of(interface: str) -> list[str]:
    """IP addresses of a network interface of this machine, IPv4 first.

    Raises:
        UsageError: there is none of that name, or it has no address.
    """
    import psutil

    known = psutil.net_if_addrs()
    if interface not in known:
        raise UnknownNameError("network interface", interface, known)
    found = [each for each in known[interface] if each.family in (socket.AF_INET, socket.AF_INET6)]
    if not found:
        raise UsageError(f"the network interface {interface} has no IP address; choose another --interface.")
    found.sort(key=lambda each: each.family == socket.AF_INET6)
    return [each.address.partition("%")[0] for each in found]


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

    processes: Annotated[Workers | None, Common("N", "processes on this machine")] = None
    hosts: Annotated[str | None, Common("FILE", "or YAML file of hosts, reached by ssh")] = None
    timeout: Seconds = "10s"
    join_timeout: Seconds = "60s"
    interface: str | None = None
    public: Annotated[bool, Parameter(negative="")] = False
    port: Annotated[int, Range(1, 65_535)] = 29400
    dry_run: Annotated[bool, Parameter(negative=""), Common("", "print the commands and start nothing")] = False

    def terms(self, max_restarts: int, min_hosts: int) -> Terms:
        """How a launch waits and starts again."""
        return Terms(parse_seconds(self.timeout), parse_seconds(self.join_timeout), max_restarts, min_hosts)


HERE = ClusterOptions()


def launch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True), Common("", "command of snugfit with its options")],
    where: ClusterOptions = HERE,
    max_restarts: Annotated[int, Range(0, 10**6), Common("N", "restarts after a lost process; 3 by default")] = 3,
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
        before, after = ["env", *variables], ["-m", AGENT, *options, "--module", *program]
        agent = f"{shlex.join(before)} {_quoted(host.python)} {shlex.join(after)}"
        there = f"cd {_quoted(host.directory)} && " if host.directory else ""
        login = f"{host.user}@{host.address}" if host.user else host.address
        command = (*SSH, login, f"{there}exec {agent}")
        commands.append(Start(host.address, command, processes=host.processes, remote=True))
    return tuple(commands)


def _quoted(path: str) -> str:
    """A path of another host for its shell, which puts the home folder in the place of ``~``."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


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
