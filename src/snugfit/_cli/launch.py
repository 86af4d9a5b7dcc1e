"""``snugfit cluster launch``: a command on several processes or hosts, by torchrun."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from snugfit._cli.launch_commands import ClusterOptions, Launching, starts
from snugfit._cli.launcher import run_all
from snugfit._core.options import Range, Workers
from snugfit.errors import UsageError

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

    Returns:
        The exit code of the rank that failed; 8 if one was lost for good.

    Raises:
        UsageError: nothing to run, options that contradict each other, or a public address.
    """
    if not command:
        raise UsageError("no command; add it after `--`, like `snugfit cluster launch --processes 2 -- train`.")
    launching = Launching(where, max_restarts, min_hosts)
    commands = starts(launching, ("snugfit", *command))
    if where.dry_run:
        print("\n".join(map(str, commands)))
        return 0
    return run_all(commands, launching.terms())
