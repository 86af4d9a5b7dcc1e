"""The agent of one host: it starts, watches and ends this host's processes in rounds, as the launcher orders over ssh.

The launcher decides who takes part in a round, and each process gets the variables that torchrun would set. torchrun is
not used: torch's ``c10d`` rendezvous keeps its state in the store as a pickle, so anyone who reaches the port can run
code as the user; and hosts judge each other by their wall clocks. Here the store contains nothing about membership.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import TCPStore

from snugfit._core.amounts import parse_seconds
from snugfit._core.hardware import cores
from snugfit._training.launch.control import Control
from snugfit._training.launch.store import dial, serve, within
from snugfit._training.launch.world import DEFAULT_TIMEOUT, SECRET_VARIABLE, TIMEOUT_VARIABLE
from snugfit.errors import InterruptedRunError, WorkerLostError

RUN_ID = "snugfit"
_GRACE_SECONDS = 2.0
"""Grace period for workers that end because another one failed; a stopped worker never ends by itself."""
_PROBE_BYTES = 2**18
_ASK_SECONDS = 0.5
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 60.0
"""A host without work ends after this silence of the launcher."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Reach:
    """Whether this host reaches the store within a limit, over the network on which processes exchange tensors."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit, self._last, self._generation = limit_seconds, 0.0, 0

    def age(self) -> float | None:
        """Seconds since the store last answered; None before the first probe."""
        return time.monotonic() - self._last if self._generation else None

    def probe(self, endpoint: str) -> str | None:
        """Write a quarter of a megabyte to the store and read it back; None if that works, else why not.

        If it works, the store is asked twice a second from then on.
        """
        payload = os.urandom(_PROBE_BYTES // 2).hex()
        try:
            store = within(self.limit, lambda: self._exchange(endpoint, payload))
        except (RuntimeError, TimeoutError, ValueError) as error:
            return str(error).splitlines()[0][:200]
        self._generation += 1
        self._last = time.monotonic()
        threading.Thread(target=self._ask, args=(store, self._generation), name="snugfit-reach", daemon=True).start()
        return None

    def _exchange(self, endpoint: str, payload: str) -> TCPStore:
        store = dial(*_split(endpoint), self.limit)
        key = f"probe/{payload[:32]}"
        store.set(key, payload)
        if store.get(key).decode() != payload:
            raise ValueError("the store answered something else")
        store.delete_key(key)
        return store

    def _ask(self, store: TCPStore, generation: int) -> None:
        with contextlib.suppress(RuntimeError):
            while generation == self._generation:
                store.add("reach", 1)
                if generation == self._generation:
                    self._last = time.monotonic()
                time.sleep(_ASK_SECONDS)


class Agent:
    """The processes of this host, which run a command, and are started again in at most ``max_restarts`` rounds."""

    def __init__(
        self, control: Control, reach: Reach, command: Sequence[str], processes: int = 1, max_restarts: int = 0
    ) -> None:
        self.control, self.reach, self.command = control, reach, command
        self.processes, self.max_restarts = processes, max_restarts
        self._workers: list[subprocess.Popen[bytes]] = []

    def run(self) -> bool:
        """Follow orders until the launch ends or the launcher is lost; whether the processes have finished."""
        done = False
        while not self.control.ended.is_set():
            if order := self.control.next_order(_POLL_SECONDS):
                self.stop(signal.SIGKILL)  # checkpoints are complete at any time, and a worker may hang
                done = False
                self._obey(order)
            elif self._workers:
                done = self._finished()
            elif not done and time.monotonic() - self.control.heard > _PATIENCE_SECONDS:
                return False
        return done

    def stop(self, number: signal.Signals) -> None:
        """Send the remaining processes a signal, and kill those that it does not end."""
        for each in (number, signal.SIGKILL):
            for worker in self._workers:
                if worker.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(worker.pid, each)
            deadline = time.monotonic() + _GRACE_SECONDS
            for worker in self._workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(max(deadline - time.monotonic(), 0))
        self._workers = []

    def _obey(self, order: Mapping[str, Any]) -> None:
        if order["order"] == "probe":
            why = self.reach.probe(str(order["store"]))
            self.control.tell("reached", round=order["round"], ok=why is None, why=why)
        else:
            for local_rank in range(self.processes):
                environment = {**os.environ, **self._variables(order, local_rank)}
                self._workers.append(
                    subprocess.Popen(self.command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
                )

    def _variables(self, order: Mapping[str, Any], local_rank: int) -> dict[str, str]:
        """The variables of torchrun for one process; its count of restarts is that of rounds."""
        address, port = _split(str(order["store"]))
        given = {
            "RANK": int(order["first"]) + local_rank,
            "WORLD_SIZE": int(order["ranks"]),
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.processes,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": int(order["round"]),
            "TORCHELASTIC_MAX_RESTARTS": self.max_restarts,
            "TORCHELASTIC_RUN_ID": RUN_ID,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        return {name: str(value) for name, value in given.items()}

    def _finished(self) -> bool:
        """Report processes that have ended; whether all have ended well."""
        codes = [worker.poll() for worker in self._workers]
        if failed := [code for code in codes if code]:
            self.stop(signal.SIGTERM)
            self.control.tell("failed", codes=failed)
        elif None not in codes:
            self._workers = []
            self.control.tell("done")
            return True
        return False


def run_agent(arguments: Sequence[str]) -> int:
    """Run the agent until the launcher ends the launch, or its connection breaks.

    Args:
        arguments: ``--serve ADDRESS:PORT`` on the first host, where the others meet; port 0 is any free one. Then
            ``--processes N``, ``--max-restarts N`` and ``--module MODULE ARGUMENT...``.

    Returns:
        Exit code: 0 if the processes finished, 8 if the launch ended without that.

    Raises:
        InterruptedRunError: a signal ended it.
        SnugfitError: it cannot listen on that address and port.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--module", nargs=argparse.REMAINDER, required=True)
    options = parser.parse_args(list(arguments))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // options.processes)))
    reach = Reach(parse_seconds(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT)))
    control = Control(sys.stdin, reach.age)
    command = (sys.executable, "-u", "-m", *options.module)
    agent = Agent(control, reach, command, options.processes, options.max_restarts)
    return _follow(agent, control, options.serve)


def _follow(agent: Agent, control: Control, endpoint: str | None) -> int:
    """Run the agent, with the store if this is the first host; a signal ends its processes too."""
    ending = signal.SIGTERM

    def interrupt(number: int, frame: object) -> None:
        nonlocal ending
        if not control.ended.is_set():
            ending = signal.Signals(number)
            raise InterruptedRunError("the launch was interrupted.")

    for number in _SIGNALS:
        signal.signal(number, interrupt)
    control.start()
    os.environ[SECRET_VARIABLE] = control.secret
    store = serve(*_split(endpoint)) if endpoint else None
    control.tell("ready", pid=os.getpid(), store=store and f"{store.host}:{store.port}")
    try:
        return 0 if agent.run() else WorkerLostError.exit_code
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        agent.stop(ending)
        control.finish()
        del store


def _split(endpoint: str) -> tuple[str, int]:
    address, _, port = endpoint.rpartition(":")
    return address.strip("[]"), int(port)
