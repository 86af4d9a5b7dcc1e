"""What ``snugfit cluster doctor`` starts once per process; the gateway prints one line of JSON behind a mark."""

from __future__ import annotations

import json
import sys

from snugfit._cli.output import show_error
from snugfit._cli.startup import die_with_agent, prepare_streams
from snugfit.errors import SnugfitError, UsageError

MARK = "snugfit-cluster "
_PATIENCE_SECONDS = 120.0
"""Other processes wait while one pair sends."""


def main() -> int:
    """Measure, and return the exit code."""
    prepare_streams()
    die_with_agent()
    try:
        _measure()
    except SnugfitError as error:
        return show_error(error, as_json=False, debug=False)
    return 0


def _measure() -> None:
    import torch

    from snugfit._training.launch import Heartbeat, join, naming_lost, share_of_threads, world
    from snugfit._training.launch.examine import examine

    here = world()
    if here is None:
        raise UsageError("this part of `snugfit cluster doctor` is started by it; call that instead.")
    torch.set_num_threads(share_of_threads(here) or 1)
    with join(here, _PATIENCE_SECONDS), Heartbeat(here) as heartbeat, naming_lost(heartbeat):
        cluster = examine(here)
    if cluster is not None:
        print(MARK + json.dumps(cluster.to_json()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
