"""``snugfit cluster launch``: a command on several processes or hosts, by torchrun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from snugfit._cli.hosts import read_hosts
from snugfit._cli.launch_commands import Wanted, starts
from snugfit._cli.launcher import run_all
from snugfit._core.options import Range, Seconds, Workers
from snugfit.errors import UsageError


@Parameter(name="*", group=Group("Cluster", sort_key=1))
@dataclass(frozen=True)
class ClusterOptions:
    """Where processes run, and how long they wait for each other.

    Attributes:
        processes: processes on this machine, which listen on its loopback alone.
        hosts: YAML file with a list `hosts` of `address`, and where they differ from the defaults `user`, `processes`
            (1), `python` (python3), `directory`, `interface`. ssh reaches them, with keys; the first is the gateway.
        timeout: silence after which a process is lost, like `10s`.
        join_timeout: how long hosts and processes wait for each other at the start, like `60s`.
        interface: network interface to listen on, and no other.
        public: listen on a public address nevertheless. Traffic is neither encrypted nor authenticated.
        port: on which the hosts meet, on the first of them.
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
        """Hosts with which to begin where all of them must take part."""
        return len(read_hosts(self.hosts)) if self.hosts else 1


HERE = ClusterOptions()


def launch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    where: ClusterOptions = HERE,
    max_restarts: Annotated[int, Range(0, 10**6)] = 3,
    min_hosts: Workers = 1,
) -> int:
    """Start a command of snugfit once per process, by torchrun, on this machine or on hosts over ssh.

    When a process is lost, all are started again from the last checkpoint; when a host is lost, with the hosts that are
    left, as long as the first one is there. Traffic is neither encrypted nor authenticated: for trusted networks.

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

    Returns:
        The exit code of the rank that failed; 8 where one was lost for good.

    Raises:
        UsageError: nothing to run, options that contradict each other, or a public address.
    """
    if not command:
        raise UsageError("nothing to run; name it after `--`, like `snugfit cluster launch --processes 2 -- train`.")
    wanted = wanted_of(where, max_restarts, min_hosts)
    commands = starts(wanted, ("snugfit", *command))
    if where.dry_run:
        print("\n".join(map(str, commands)))
        return 0
    return run_all(commands, wanted.terms())


def wanted_of(where: ClusterOptions, max_restarts: int, min_hosts: int) -> Wanted:
    """What the options say."""
    return Wanted(
        where.processes, where.hosts, max_restarts, where.timeout, where.interface, where.public, min_hosts, where.port,
        where.join_timeout,
    )  # fmt: skip
