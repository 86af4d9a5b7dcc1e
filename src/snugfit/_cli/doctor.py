"""``snugfit cluster doctor``: measures the processes of a cluster and the links between them."""

from __future__ import annotations

import json
from typing import Annotated

from snugfit._cli.examine import MARK
from snugfit._cli.launch import HERE, ClusterOptions, read_hosts, starts
from snugfit._cli.launcher import run_all
from snugfit._cli.options import SHOW_ALL, OutputOptions
from snugfit._cli.output import FailedError, note, print_json, print_tables
from snugfit._core.hardware import Cluster, Link, Rank
from snugfit._core.options import Common
from snugfit._quantities import format_bytes
from snugfit._storage.outputs import require_file, whole_file
from snugfit._version import SCHEMA
from snugfit.errors import InterruptedRunError, SnugfitError, WorkerLostError

MODULE = "snugfit._cli.examine"
_RANK_COLUMNS = "rank", "host", "cores", "threads", "free memory", "clock", "speed"
_LINK_COLUMNS = "from", "to", "bandwidth", "", "latency"


def doctor(
    *,
    where: ClusterOptions = HERE,
    out: Annotated[str | None, Common("FILE", "file for the measurements, as JSON")] = None,
    output: OutputOptions = SHOW_ALL,
) -> int:
    """Measure every process and every link between two: versions, memory, clock and speed; bandwidth and latency.

    The table goes to stderr. Traffic is neither encrypted nor authenticated: for networks that you trust.

    For example:

    ```
    snugfit cluster doctor --processes 2
    snugfit cluster doctor --hosts cluster.yaml --out cluster.json
    ```

    Args:
        where: the processes or hosts.
        out: file for the measurements, as JSON.
        output: what is shown.
    """
    terms = where.terms(max_restarts=0, min_hosts=len(read_hosts(where.hosts)) if where.hosts else 1)
    commands = starts(where, terms, (MODULE,))
    if where.dry_run:
        print("\n".join(map(str, commands)))
        return 0
    if out is not None:
        require_file(out)
    found: list[str] = []
    code = run_all(commands, terms, found.append)
    lines = [line.removeprefix(MARK) for line in found if line.startswith(MARK)]
    if code or not lines:
        raise _failed(code)
    cluster = Cluster.from_json(json.loads(lines[-1]))
    if not output.quiet:
        print_cluster(cluster)
    if out is not None:
        with whole_file(out) as file:
            file.write(json.dumps(cluster.to_json(), indent=1) + "\n")
        note(f"written: {out}")
    if output.json:
        print_json({"schema": SCHEMA, **cluster.to_json()})
    return 0


def _failed(code: int) -> SnugfitError:
    if code == InterruptedRunError.exit_code:
        return InterruptedRunError("interrupted; nothing was measured.")
    if code in (0, WorkerLostError.exit_code):
        return WorkerLostError("a process was lost or did not join; nothing was measured.\nThe lines above say which.")
    return FailedError("ClusterError", "a process failed; nothing was measured.\nThe lines above say why.", code)


def print_cluster(cluster: Cluster) -> None:
    """Print ranks, links and differing versions on stderr."""
    print_tables(
        ("Processes", _RANK_COLUMNS, map(_rank_row, cluster.ranks)),
        ("Links", _LINK_COLUMNS, map(_link_row, cluster.links)),
    )
    for name, versions in cluster.differing_versions().items():
        note(f"warning: {name} differs between ranks: {', '.join(versions)}. Install the same everywhere.")


def _rank_row(rank: Rank) -> list[str]:
    clock, speed = f"{rank.clock_offset_seconds * 1e3:+.1f} ms", f"{rank.macs_per_second / 1e9:.2f} GMAC/s"
    return [*map(str, (rank.rank, rank.host, rank.cores, rank.threads)), format_bytes(rank.free_bytes), clock, speed]


def _link_row(link: Link) -> list[str]:
    bits, latency = f"{link.bytes_per_second * 8 / 1e6:.1f} Mbit/s", f"{link.latency_seconds * 1e3:.2f} ms"
    return [str(link.source), str(link.target), f"{format_bytes(link.bytes_per_second)}/s", bits, latency]
