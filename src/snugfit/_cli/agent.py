"""torchrun's agent on a host of `snugfit cluster`. Arguments: ``[--serve ADDRESS:PORT]``, then those of torchrun."""

from __future__ import annotations

import logging
import os
import sys

from snugfit._cli.output import show_error
from snugfit._cli.startup import prepare_streams
from snugfit.errors import SnugfitError


def main() -> int:
    """Run the agent of this host and return its exit code; stderr says why it failed."""
    prepare_streams()
    # torch prints stack traces for refused connections and lines for ended processes; the launcher reports both
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    logging.disable(logging.ERROR)
    arguments = sys.argv[1:]
    serve = None
    if arguments[:1] == ["--serve"]:
        serve, arguments = arguments[1], arguments[2:]
    try:
        from snugfit._training.launch.agent import run_agent

        return run_agent(arguments, serve)
    except (SnugfitError, KeyboardInterrupt) as error:
        return show_error(error, as_json=False, debug=False)


if __name__ == "__main__":
    sys.exit(main())
