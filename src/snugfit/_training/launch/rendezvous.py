"""A rendezvous for torchrun: the launcher decides who takes part, and hosts prove that they reach the store.

torch's ``c10d`` rendezvous keeps its state in the store as a pickle, so anyone who reaches the port can run code as the
user; and hosts judge each other by their wall clocks. Here the launcher keeps the state, which reaches every host by
ssh; the store contains nothing about membership.
"""

from __future__ import annotations

import os
import threading
import time

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from snugfit._training.launch.control import Control
from snugfit._training.launch.store import dial, split_endpoint, within
from snugfit.errors import first_line

BACKEND = "snugfit"
"""Name of this rendezvous for ``torchrun --rdzv-backend``."""

_PROBE_BYTES = 2**18
_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0
"""A host without work ends after this silence of the launcher."""


class Reach:
    """Whether this host reaches the store, over the network on which processes exchange tensors.

    Args:
        limit_seconds: for a probe.
    """

    def __init__(self, limit_seconds: float) -> None:
        self.limit, self._last, self._generation = limit_seconds, 0.0, 0

    def age(self) -> float | None:
        """Seconds since the store last answered; None before the first probe."""
        return time.monotonic() - self._last if self._generation else None

    def probe(self, endpoint: str) -> str | None:
        """Write a quarter of a megabyte to the store and read it back; if that works, repeat it every second.

        Returns:
            None if it works within the limit, else why not.
        """
        payload = os.urandom(_PROBE_BYTES // 2).hex()
        try:
            store = within(self.limit, lambda: self._exchange(endpoint, payload))
        except (RuntimeError, TimeoutError, ValueError) as error:
            return first_line(error)[:200]
        self._generation += 1
        self._last = time.monotonic()
        threading.Thread(target=self._ask, args=(store, self._generation), name="snugfit-reach", daemon=True).start()
        return None

    def _exchange(self, endpoint: str, payload: str) -> TCPStore:
        store = dial(*split_endpoint(endpoint), self.limit)
        key = f"probe/{payload[:32]}"
        store.set(key, payload)
        if store.get(key).decode() != payload:
            raise ValueError("the store answered something else")
        store.delete_key(key)
        return store

    def _ask(self, store: TCPStore, generation: int) -> None:
        try:
            while generation == self._generation:
                store.add("reach", 1)
                if generation == self._generation:
                    self._last = time.monotonic()
                time.sleep(_POLL_SECONDS)
        except RuntimeError:
            return


class Rendezvous(RendezvousHandler):
    """Rounds that the launcher orders.

    Args:
        control: the connection to the launcher.
        reach: to the store.
        run_id: name of the launch.
    """

    def __init__(self, control: Control, reach: Reach, run_id: str) -> None:
        self.control, self.reach, self.run_id = control, reach, run_id
        self.round, self.first_rank, self.ranks = 0, 0, 0

    def get_backend(self) -> str:
        """Name of the rendezvous."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: workers meet in the store of the first host's agent, which outlives them."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Answer probes, and wait until the launcher begins a round with this host.

        Raises:
            RendezvousClosedError: the launcher has ended the launch, or is lost.
        """
        while not self.control.ended.is_set():
            order = self.control.next_order(_POLL_SECONDS)
            if order is None:
                if time.monotonic() - self.control.heard > _PATIENCE_SECONDS:
                    raise RendezvousClosedError("the launcher is gone")
            elif order["order"] == "probe":
                why = self.reach.probe(str(order["store"]))
                self.control.tell("reached", round=order["round"], ok=why is None, why=why)
            else:
                self.round, self.first_rank, self.ranks = (int(order[name]) for name in ("round", "first", "ranks"))
                meeting = RendezvousStoreInfo(*split_endpoint(str(order["store"])))
                return RendezvousInfo(HashStore(), int(order["host"]), int(order["hosts"]), meeting)
        raise RendezvousClosedError("the launch has ended")

    def num_nodes_waiting(self) -> int:
        """More than 0 if the launcher wants a new round, for which torchrun stops the workers."""
        return int(self.control.pending())

    def is_closed(self) -> bool:
        """Whether the launch has ended."""
        return self.control.ended.is_set()

    def set_closed(self) -> None:
        """Do nothing: only the launcher ends a launch."""

    def get_run_id(self) -> str:
        """Name of the launch."""
        return self.run_id

    def shutdown(self) -> bool:
        """Do nothing; there is nothing to free."""
        return True
