"""torchrun's agent on one host: the launcher decides over ssh who takes part; it listens on one address only."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, rendezvous_handler_registry
from torch.distributed.launcher import api as launcher
from torch.distributed.run import parse_args, run

from snugfit._core.amounts import parse_seconds
from snugfit._core.hardware import cores
from snugfit._training.launch.control import Control
from snugfit._training.launch.rendezvous import BACKEND, Reach, Rendezvous
from snugfit._training.launch.store import serve, split_endpoint
from snugfit._training.launch.world import DEFAULT_TIMEOUT, SECRET_VARIABLE, TIMEOUT_VARIABLE
from snugfit.errors import InterruptedRunError, WorkerLostError

_GRACE_SECONDS = 2
"""Grace period for workers that end because another one failed; a stopped worker would wait out torchrun's 30 s."""


class Agent(LocalElasticAgent):
    """torchrun's agent; the launcher decides whether and with whom its workers start again."""

    _done: RunResult | None = None

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> list[Worker]:
        """Assign the launcher's ranks; torchrun's own count of restarts becomes that of rounds."""
        here: Rendezvous = spec.rdzv_handler
        self._remaining_restarts = spec.max_restarts - here.round
        self._done = None
        return [
            Worker(
                local_rank=each,
                global_rank=here.first_rank + each,
                role_rank=here.first_rank + each,
                world_size=here.ranks,
                role_world_size=here.ranks,
            )
            for each in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        found: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        context.close = functools.partial(_close, context.close)
        return found

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        """Report failed workers; keep the agent alive after they are done, in case others need them again."""
        control: Control = worker_group.spec.rdzv_handler.control
        if self._done is not None:
            return self._done if control.ended.is_set() else RunResult(WorkerState.HEALTHY)
        if control.ended.is_set():
            raise SignalException("the launch has ended", signal.SIGTERM)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.failures:
            codes = [failure.exitcode for failure in result.failures.values()]
            control.tell("failed", codes=codes)
            self._remaining_restarts = 1  # so that torchrun asks the rendezvous, where the launcher decides
        elif result.state == WorkerState.SUCCEEDED:
            control.tell("done")
            self._done = result
            return RunResult(WorkerState.HEALTHY)
        return result

    def _stop_workers(self, worker_group: Any) -> None:
        """Kill the remaining workers: checkpoints are complete at any time, and a worker may hang in a collective."""
        self._shutdown(signal.SIGKILL, _GRACE_SECONDS)

    def _exit_barrier(self) -> None:
        """Do nothing, because the launcher waits for all."""


def _close(close: Callable[..., None], death_sig: signal.Signals | None = None, timeout: int = _GRACE_SECONDS) -> None:
    close(death_sig, timeout)


def run_agent(arguments: Sequence[str], endpoint: str | None = None) -> int:
    """Run torchrun's agent until the launcher ends the launch, or its connection breaks.

    Args:
        arguments: of torchrun.
        endpoint: address and port on which the hosts meet, on the first of them; port 0 is any free one.

    Returns:
        Exit code: 0 if the workers finished, 8 if the launch ended without that.

    Raises:
        InterruptedRunError: a signal ended it.
        SnugfitError: it cannot listen on that address and port.
    """
    options = parse_args(list(arguments))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // int(options.nproc_per_node))))
    reach = Reach(parse_seconds(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT)))
    control = Control(sys.stdin, reach.age)
    control.start()
    os.environ[SECRET_VARIABLE] = control.secret
    rendezvous_handler_registry.register(BACKEND, lambda given: Rendezvous(control, reach, given.run_id))
    vars(launcher)["LocalElasticAgent"] = Agent
    store = serve(*split_endpoint(endpoint)) if endpoint else None
    control.tell("ready", pid=os.getpid(), store=store and f"{store.host}:{store.port}")
    try:
        run(options)
    except (ChildFailedError, RendezvousClosedError):
        return WorkerLostError.exit_code
    except (SignalException, KeyboardInterrupt) as error:
        if control.ended.is_set():
            return WorkerLostError.exit_code
        raise InterruptedRunError("the launch was interrupted.") from error
    finally:
        control.finish()
        del store
    return 0
