"""torchrun on one host: with the exit code of the rank that failed, and listening on one address alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher
from torch.distributed.run import parse_args, run

from snugfit.core.hardware import cores
from snugfit.errors import InterruptedRunError, SnugfitError, WorkerLostError
from snugfit.training.launch.store import listen

WORTHWHILE = frozenset({1, WorkerLostError.exit_code})
"""Exit codes of ranks after which a restart may help; usage errors and impossible budgets stay what they are."""
_LAST_SECONDS = 40.0
_ORDERS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}


class Agent(LocalElasticAgent):
    """torchrun's agent, which starts nothing again that cannot do better the next time."""

    def _monitor_workers(self, worker_group):  # type: ignore[no-untyped-def]
        result = super()._monitor_workers(worker_group)
        codes = [failure.exitcode for failure in result.failures.values()]
        if codes and exit_code(codes) not in WORTHWHILE:  # others were told to end: they say that they were interrupted
            self._remaining_restarts = 0
        return result


def run_agent(arguments: Sequence[str], serve: str | None = None) -> int:
    """Run torchrun's agent until its ranks have ended.

    Lines on stdin are signals to send itself, like ``SIGINT``, and the end of stdin is SIGTERM: so that Ctrl-C, and a
    connection that breaks, reach the ranks of other hosts.

    Args:
        arguments: of torchrun.
        serve: address and port on which the hosts meet, on the first of them.

    Returns:
        Exit code: of the rank that failed, 8 where a signal killed it, 0 where none did.

    Raises:
        WorkerLostError: the hosts did not find each other, or too few are left.
        InterruptedRunError: a signal ended it.
    """
    options = parse_args(list(arguments))  # type: ignore[no-untyped-call]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // int(options.nproc_per_node))))
    launcher.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    store = _serve(serve) if serve else None
    threading.Thread(target=_obey, args=(sys.stdin,), name="snugfit-orders", daemon=True).start()
    try:
        run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        return exit_code(failure.exitcode for failure in error.failures.values())
    except (SignalException, KeyboardInterrupt) as error:
        raise InterruptedRunError("the launch was interrupted.") from error
    except (RendezvousError, OSError, RuntimeError) as error:
        raise _unmet(error) from error
    finally:
        del store
    return 0


def exit_code(codes: Iterable[int]) -> int:
    """One exit code for several ranks that failed: a fault of its own before the loss of others before interruption."""
    found = [WorkerLostError.exit_code if code < 0 else code for code in codes]
    lesser = (WorkerLostError.exit_code, InterruptedRunError.exit_code)
    return next((code for code in found if code not in lesser), min(found, default=1))


def _serve(endpoint: str) -> TCPStore:
    address, _, port = endpoint.rpartition(":")
    listener = listen(address.strip("[]"), int(port))
    return TCPStore(
        address.strip("[]"), int(port), is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _obey(orders: Iterable[str]) -> None:
    for line in orders:
        os.kill(os.getpid(), _ORDERS.get(line.strip(), signal.SIGTERM))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_SECONDS)
    os._exit(WorkerLostError.exit_code)  # stuck in native code, on a connection that was cut


def _unmet(error: BaseException) -> SnugfitError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return WorkerLostError(
        f"the hosts lost, or did not find, each other: {said}\n"
        "Look whether the first host can be reached by all, and `snugfit train --resume RUN` goes on."
    )
