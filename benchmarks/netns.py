"""Hosts of a small network on one machine: network namespaces joined by a bridge, with links as slow as one likes.

Needs root, ``ip`` and ``tc`` (iproute2). As a script it opens such hosts and runs one command in each::

    python -m benchmarks.netns --hosts-count 2 --rate 10mbit -- ip addr
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import App

INTERFACE = "eth0"
_BURST_SECONDS = 0.002
_QUEUE = "50ms"


class NoNamespacesError(RuntimeError):
    """This machine cannot have such hosts; the message says why."""


def why_not() -> str | None:
    """Why this machine cannot have such hosts; None where it can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"snug{os.getpid()}x"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Host:
    """A namespace with an address of its own.

    Attributes:
        name: of the namespace.
        address: IP address on ``eth0``.
    """

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command line that runs inside."""
        return ["ip", "netns", "exec", self.name, *words]

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command inside and wait for it."""
        return subprocess.run(self.command(*words), check=False, text=True, **options)

    def start(self, *words: str, environment: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        """Start a command inside."""
        return subprocess.Popen(self.command(*words), text=True, env={**os.environ, **(environment or {})}, **options)

    def shape(self, rate: str) -> None:
        """Send no faster than that, like ``10mbit``."""
        bits = _bits(rate)
        burst = max(int(bits / 8 * _BURST_SECONDS), 4000)
        limits = ["rate", f"{bits}bit", "burst", f"{burst}b", "latency", _QUEUE]
        _do(*self.command("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *limits))

    def cut(self) -> None:
        """Pull the cable: nothing arrives, nothing is refused."""
        _do(*self.command("ip", "link", "set", INTERFACE, "down"))

    def mend(self) -> None:
        """Plug it in again."""
        _do(*self.command("ip", "link", "set", INTERFACE, "up"))


@contextlib.contextmanager
def hosts(count: int, rate: str | None = None, subnet: str = "10.213.7") -> Iterator[tuple[Host, ...]]:
    """Hosts that reach each other and nothing else; all is removed afterwards, also after errors.

    Args:
        count: how many.
        rate: of every host's sending, like ``10mbit``; as fast as the machine where None.
        subnet: first three numbers of the addresses.

    Raises:
        NoNamespacesError: this machine cannot.
    """
    reason = why_not()
    if reason:
        raise NoNamespacesError(reason)
    prefix = f"snug{os.getpid()}"
    middle, made = f"{prefix}b", [Host(f"{prefix}h{n}", f"{subnet}.{n + 1}") for n in range(count)]
    try:
        _do("ip", "netns", "add", middle)
        _do("ip", "-n", middle, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", middle, "link", "set", "br0", "up")
        for number, host in enumerate(made):
            _plug(host, middle, number)
            if rate:
                host.shape(rate)
        yield tuple(made)
    finally:
        for name in (*(host.name for host in made), middle):
            _remove(name)


def _plug(host: Host, middle: str, number: int) -> None:
    """A cable from the host to the bridge."""
    port = f"port{number}"
    _do("ip", "netns", "add", host.name)
    _do("ip", "link", "add", INTERFACE, "netns", host.name, "type", "veth", "peer", "name", port, "netns", middle)
    _do("ip", "-n", middle, "link", "set", port, "master", "br0", "up")
    _do("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    for interface in ("lo", INTERFACE):
        _do("ip", "-n", host.name, "link", "set", interface, "up")


def _remove(name: str) -> None:
    """End what still runs in a namespace, and the namespace."""
    left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout.split()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespacesError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def _bits(rate: str) -> int:
    for unit, factor in (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        if rate.endswith(unit):
            return int(float(rate.removesuffix(unit)) * factor)
    raise ValueError(f"'{rate}' is no rate; write it like 10mbit")


app = App(
    help="Run a command in each of several hosts of a small network on this machine.", result_action="return_value"
)


@app.default
def main(*command: str, hosts_count: int = 2, rate: str | None = None) -> int:
    """Run a command in each host at once.

    Args:
        command: after `--`.
        hosts_count: how many hosts.
        rate: of each, like 10mbit.
    """
    with hosts(hosts_count, rate) as made:
        running = [host.start(*command, environment={"HOST_NUMBER": str(n)}) for n, host in enumerate(made)]
        return max(process.wait() for process in running)


def ssh_into(made: Sequence[Host], folder: Path) -> dict[str, str]:
    """Variables under which ``ssh ADDRESS COMMAND`` runs the command in the host of that address.

    Args:
        made: the hosts.
        folder: where the stand-in for ssh is written.
    """
    cases = "\n".join(f"  *{host.address}) name={host.name};;" for host in made)
    stand_in = folder / "ssh"
    stand_in.write_text(
        "#!/bin/sh\nfor word; do target=$command; command=$word; done\n"
        f'case "$target" in\n{cases}\n  *) exit 255;;\nesac\n'
        'exec ip netns exec "$name" sh -c "$command"\n'
    )
    stand_in.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


if __name__ == "__main__":
    sys.exit(app())
