"""This host's network interfaces and names."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

_ANY_PORT = 9


def interface_towards(address: str) -> str | None:
    """Name of the interface through which this host reaches an address; nothing is sent.

    Returns:
        None without a route, or if its interface is unknown.
    """
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


def use_interface(interface: str | None, gateway: str) -> None:
    """Let gloo and NCCL listen on one interface only: the given one, or the one that leads to the gateway.

    ``GLOO_SOCKET_IFNAME`` is kept unless an interface is given.
    """
    chosen = interface or os.environ.get("GLOO_SOCKET_IFNAME") or interface_towards(gateway)
    if chosen:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = chosen


def own_name(gateway: str) -> str:
    """This process as text, like ``process 4711 on nano-2, 10.0.0.3``."""
    name, address = own_host(gateway)
    return f"process {os.getpid()} on {name}" + (f", {address}" if address else "")


def own_host(gateway: str) -> tuple[str, str]:
    """Name and address of this host; the address is empty if all processes are on one host.

    Args:
        gateway: address of the first host.
    """
    address = own_address(gateway)
    local = address is None or address.startswith("127.") or address == "::1"
    return socket.gethostname(), "" if address is None or local else address


def unique_names(hosts: Sequence[tuple[str, str]]) -> list[str]:
    """A unique name for each host: its own, with its address if another host has the same name."""
    return [
        f"{name} ({address})" if address and any(n == name and a != address for n, a in hosts) else name
        for name, address in hosts
    ]
