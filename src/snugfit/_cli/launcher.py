"""The launcher: rounds of a launch over the hosts that answer, until the first host is done."""

from __future__ import annotations

import contextlib
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from snugfit._cli.member import Member, Reports, Start
from snugfit._cli.output import note
from snugfit.errors import InterruptedRunError, WorkerLostError

WORTHWHILE = frozenset({1, WorkerLostError.exit_code})
"""Exit codes of ranks after which a restart may help; it does not help after usage errors or impossible budgets."""
_TICK_SECONDS = 0.1
_BEAT_SECONDS = 5.0
_SETTLE_SECONDS = 1.0
"""Wait for reports of other hosts after one has failed."""
_REGROUP_SECONDS = 3.0
"""Wait for other hosts to return after the first host can start again."""
_AGAIN_SECONDS = 3.0
"""Between two attempts to reach a required host."""
_SLUGGISH_SECONDS = 2.0
"""Without an answer of the store, after which the launch does not wait for a host."""
_END_SECONDS = 15.0
_LAST_SECONDS = 60.0


@dataclass(frozen=True)
class Terms:
    """How a launch waits for silent hosts and at the start, how many rounds follow the first, and with which hosts."""

    timeout_seconds: float = 10.0
    join_seconds: float = 60.0
    max_restarts: int = 0
    min_hosts: int = 1


def run_all(starts: Sequence[Start], terms: Terms, on_line: Callable[[str], None] | None = None) -> int:
    """Run the processes of all hosts, the gateway's first, until the first host's have ended; pass signals on.

    Lines that the processes print on stdout go to ``on_line``, or else to stdout. The exit code is 0 if the first
    host's is 0, else that of the failed rank.
    """
    launch = Launch(starts, terms, on_line or _print)
    with _signals_to(launch):
        try:
            return launch.run()
        finally:
            for member in launch.members:
                member.hang_up()


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


@contextlib.contextmanager
def _signals_to(launch: Launch) -> Iterator[None]:
    """Record signals for the launch; a hang-up that nohup ignores stays ignored."""

    def record(number: int, frame: object) -> None:
        launch.signals.append("SIGINT" if number == signal.SIGINT else "SIGTERM")

    hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    numbers = (signal.SIGINT, signal.SIGTERM, *hang_up)
    previous = {number: signal.signal(number, record) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Launch:
    """One launch: its members, the gateway's host first, and its rounds."""

    def __init__(self, starts: Sequence[Start], terms: Terms, on_line: Callable[[str], None]) -> None:
        self.terms, self.signals = terms, list[str]()
        self._reports: Reports = queue.Queue()
        secret = secrets.token_hex(32)
        self.members = [Member(start, self._reports, secret, on_line) for start in starts]
        self._interrupted: float | None = None
        self._beaten = 0.0

    def run(self) -> int:
        """All rounds; returns the exit code."""
        for member in self.members:
            member.dial()
        codes: list[int] = []
        for number in range(self.terms.max_restarts + 1):
            there = self._gather(number)
            if self._interrupted is not None:
                return self._end(InterruptedRunError.exit_code)
            if not there:
                codes = codes or [self.members[0].code or WorkerLostError.exit_code]
                break
            self._begin(number, there)
            codes = self._watch(there)
            if not codes:
                return self._end(0)
            if self._interrupted is not None or exit_code(codes) not in WORTHWHILE:
                break
        return self._end(exit_code(codes))

    def _gather(self, number: int) -> list[Member]:
        """Members that reach the store of the first, in the order of the hosts; none if they are too few."""
        for member in self.members:
            if member.silent(self.terms.timeout_seconds) or (member.code is not None and number):
                member.dial()
        began, probed = time.monotonic(), dict[Member, float]()
        settled: float | None = None
        while time.monotonic() < began + self.terms.join_seconds and self._interrupted is None:
            self._probe(number, probed)
            there = self._there(number)
            if self.members[0] in there and len(there) >= self.terms.min_hosts:
                settled = time.monotonic() if settled is None else settled
                waited = time.monotonic() - settled > min(_REGROUP_SECONDS, self.terms.timeout_seconds)
                if self._answered(number) or (number and waited):
                    break
            elif not number and not self._possible():
                break
            self._pump()
        return self._enough(self._there(number), number)

    def _there(self, number: int) -> list[Member]:
        return [member for member in self.members if member.reached == (number, True) and member.code is None]

    def _possible(self) -> bool:
        """Whether enough hosts have not failed yet at the start, when a wrong address is not tried again."""
        left = [member for member in self.members if member.code is None]
        return self.members[0] in left and len(left) >= self.terms.min_hosts

    def _probe(self, number: int, probed: dict[Member, float]) -> None:
        """Probe whether hosts reach the store, repeatedly if they do not; restart agents that have ended."""
        now, first = time.monotonic(), self.members[0]
        for member in self.members:
            waited = now - probed.get(member, 0.0) > _AGAIN_SECONDS
            if member.code is not None:
                if number and waited:
                    member.dial()
                    probed[member] = now
            elif first.code is None and first.store and member.wants_probe(number, first, waited):
                probed[member] = now
                member.probe(number, first)

    def _answered(self, number: int) -> bool:
        """Whether no host is left to wait for; one that was hard to reach before is awaited only at the start."""
        return all(
            member.code is not None or member.reached[0] == number or (number and member.age > _SLUGGISH_SECONDS)
            for member in self.members
        )

    def _enough(self, there: list[Member], number: int) -> list[Member]:
        absent = [member for member in self.members if member not in there]
        for member in absent:
            why = member.lost(self.terms.timeout_seconds) or (member.why if member.reached[0] == number else "")
            note(f"host {member.start.host} does not take part: {why or 'it did not answer in time'}.")
        if self._interrupted is not None or (self.members[0] in there and len(there) >= self.terms.min_hosts):
            return there
        note(
            f"too few hosts: {len(there)} of {len(self.members)} answer, --min-hosts is {self.terms.min_hosts}, and "
            "the first host, which has the data, is required. `snugfit train --resume RUN` continues later."
        )
        return []

    def _begin(self, number: int, there: Sequence[Member]) -> None:
        if number:
            note(f"restart {number} of {self.terms.max_restarts}, with {len(there)} of {len(self.members)} hosts.")
        ranks, first = sum(member.start.processes for member in there), 0
        for host, member in enumerate(there):
            member.begin(
                round=number, host=host, hosts=len(there), first=first, ranks=ranks, store=self.members[0].store
            )
            first += member.start.processes

    def _watch(self, there: Sequence[Member]) -> list[int]:
        """Wait until a round is over; returns exit codes of failed ranks, or none if the first host is done."""
        over: float | None = None
        while True:
            self._pump()
            now = time.monotonic()
            codes = [code for member in there for code in member.codes]
            codes += [member.code for member in there if member.code is not None]
            lost = [member for member in there if member.lost(self.terms.timeout_seconds) is not None]
            if self._interrupted is not None and not there[0].done:
                if all(member.code is not None for member in there) or now > self._interrupted + _LAST_SECONDS:
                    return [InterruptedRunError.exit_code]
            elif there[0].done:
                over = over or now
                if all(member.done or member in lost or member.codes for member in there) or now > over + _END_SECONDS:
                    return []
            elif codes or lost:
                over = over or now
                reported = all(member.codes for member in there)
                if lost or reported or now > over + min(_SETTLE_SECONDS, self.terms.timeout_seconds):
                    for member in lost:
                        note(f"host {member.start.host} is lost: {member.lost(self.terms.timeout_seconds)}.")
                    return codes or [WorkerLostError.exit_code]

    def _end(self, code: int) -> int:
        """End the agents of all hosts, and wait a little while they clean up."""
        for member in self.members:
            member.send("end")
        deadline, limit = time.monotonic() + _END_SECONDS, self.terms.timeout_seconds
        while any(each.code is None and not each.silent(limit) for each in self.members):
            if time.monotonic() > deadline:
                break
            self._pump()
        return code

    def _pump(self) -> None:
        """Handle reports, pass signals on, and send heartbeats."""
        while self.signals:
            name = self.signals.pop(0)
            self._interrupted = time.monotonic()
            for member in self.members:
                member.send("signal", name=name)
        if time.monotonic() > self._beaten + _BEAT_SECONDS:
            self._beaten = time.monotonic()
            for member in self.members:
                member.send("beat")
        timeout = _TICK_SECONDS
        with contextlib.suppress(queue.Empty):
            while True:
                member, generation, report = self._reports.get(timeout=timeout)
                member.hear(generation, report)
                timeout = 0


def exit_code(codes: Sequence[int]) -> int:
    """One exit code for several failed ranks: a rank's own fault first, then lost ranks, then interruption."""
    lost, interrupted = WorkerLostError.exit_code, InterruptedRunError.exit_code
    found = [code if 0 < code < lost or code == interrupted else lost for code in codes if code]
    return next((code for code in found if code not in (lost, interrupted)), min(found, default=lost))
