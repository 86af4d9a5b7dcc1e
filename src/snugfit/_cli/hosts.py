"""The hosts of a cluster, from a small YAML file."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from snugfit._core.yaml_text import read_yaml
from snugfit.errors import UnknownNameError, UsageError

EXAMPLE = "hosts: [{address: 10.0.0.1}, {address: 10.0.0.2}]"


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
        if type(value) is not kinds[name] or not value or (name in {"address", "user"} and str(value).startswith("-")):
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
