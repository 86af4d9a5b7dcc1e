"""The agent on a host of `snugfit cluster`; ``run_agent`` says its arguments."""

from __future__ import annotations

import os
import sys

from snugfit._cli.output import show_error
from snugfit._cli.startup import prepare_streams
from snugfit.errors import SnugfitError


def main() -> int:
    """Run the agent of this host and return its exit code; stderr says why it failed."""
    prepare_streams()
    # torch prints stack traces for refused connections; the launcher reports them
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from snugfit._training.launch.agent import run_agent

        return run_agent(sys.argv[1:])
    except (SnugfitError, KeyboardInterrupt) as error:
        return show_error(error, as_json=False, debug=False)


if __name__ == "__main__":
    sys.exit(main())
