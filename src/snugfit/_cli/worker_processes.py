"""Processes for jobs: started, or forked from a process that has imported torch and done nothing else.

Memory that measuring leaves behind counts to a budget, so that plans are made in processes of their own. Importing
torch takes most of their time. What a forked process rests at, and what it may use, is the same: the kernel counts
pages that it shares with the server as its own. The server ends before training begins, because each of the two then
has a copy of a page that changes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from snugfit._cli.startup import adopt_orphans
from snugfit._core.forking import FORWARDED, die_with_parent, may_fork
from snugfit._core.option_groups import BudgetOptions
from snugfit.errors import InterruptedRunError

WORKER_MODULE = "snugfit._cli.worker"
_MOST_JOB_BYTES = 2**20
_server: list[tuple[int, int]] = []
"""In a forked process: the server's process id, and a pipe that ends with the server."""


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block signals until both sides can handle them; a process that is started inherits the mask and lifts it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_worker(descriptor: int, job: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a worker with a job, in its own session: a Ctrl-C reaches it once, through this process.

    Args:
        descriptor: the file to which it writes, or a socket from which it reads its jobs.
        job: what it does.
    """
    command = [sys.executable, "-m", WORKER_MODULE, str(descriptor), str(os.getpid())]
    with blocked_signals():
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=2, pass_fds=(descriptor,), start_new_session=True
        )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(json.dumps(job).encode())
    return child


class ForkServer:
    """The side of the command line.

    Attributes:
        process: the server, whose process group has the forked processes, too.
    """

    def __init__(self, threads: int | None) -> None:
        self._jobs, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = start_worker(theirs.fileno(), {"command": "serve", "threads": threads})

    def fork(self, job: dict[str, Any], writing: int) -> ForkedChild:
        """Start a job in a process of its own, which sends its messages through a pipe."""
        with contextlib.suppress(OSError):  # the server has died, and the pipe ends at once
            socket.send_fds(self._jobs, [json.dumps(job).encode()], [writing])
        return ForkedChild(self.process)

    def close(self) -> None:
        """End the server."""
        self._jobs.close()
        self.process.kill()
        self.process.wait()


class ForkedChild:
    """A forked process, used like a ``subprocess.Popen``.

    Attributes:
        pid: its process id, which it sends first; None before, and 0 if the system refused to fork.
    """

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self._server = server
        self.pid: int | None = None
        self._code: int | None = None

    def begin(self, line: str) -> None:
        """Take the first line of its messages."""
        pid: int = json.loads(line)["pid"]
        self.pid, self._code = pid, None if pid else 1

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, and to the server, which it ends."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._waited(os.WNOHANG)

    def wait(self) -> int:
        """The exit code, negative for a signal; that of the server if it died before it forked."""
        if self.pid is None:
            self._server.kill()
            return self._server.wait()
        code = self._waited(0)
        assert code is not None
        return code

    def _waited(self, flags: int) -> int | None:
        if self._code is None and self.pid is not None:
            pid, status = os.waitpid(self.pid, flags)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


@contextlib.contextmanager
def fork_server(budget: BudgetOptions, threads: int | None = None) -> Iterator[ForkServer | None]:
    """A server while the context lasts; None beyond Linux, in a launch, and where its memory counts or is short."""
    if budget.total_memory is not None or not may_fork():
        yield None
        return
    adopt_orphans(True)
    server = ForkServer(threads)
    try:
        yield server
    finally:
        server.close()
        adopt_orphans(False)


def import_api(name: str) -> Any:
    """Import a module, and torch with it, without looking for garbage meanwhile, which took 0.3 s.

    Nobody looks for garbage among its objects later: that would change their pages, so that each forked process had
    its own copy.
    """
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def forked_job(descriptor: int, parent: int, api: str) -> tuple[dict[str, Any], int] | None:
    """Fork a process for every job that comes from the command line's socket.

    Returns:
        In a forked process, its job and the pipe for its messages; None in the server once the command line is done.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    with contextlib.suppress(Exception):  # the job's own import fails again, and says why
        import_api(api)
    server, (watching, alive) = os.getpid(), os.pipe()
    with socket.socket(fileno=descriptor) as jobs:
        while True:
            text, pipes, *_ = socket.recv_fds(jobs, _MOST_JOB_BYTES, 1)
            if not text:
                return None
            try:
                is_forked = _fork(parent)
            except OSError:
                is_forked = False
                os.write(pipes[0], b'{"pid": 0}\n')
            if is_forked:
                os.close(alive)
                _server[:] = [(server, watching)]
                return json.loads(text), pipes[0]
            os.close(pipes[0])


def _fork(parent: int) -> bool:
    """Fork a child of the command line's process, which adopts it: that waits for it, and it may outlive the server.

    True in the child.

    Raises:
        OSError: the system has no memory or no process left.
    """
    middle = os.fork()
    if middle:
        if os.waitpid(middle, 0)[1]:
            raise BlockingIOError("the system refused to fork")
        return False
    middle = os.getpid()
    try:
        child = os.fork()
    except OSError:
        os._exit(1)
    if child:
        os._exit(0)
    while os.getppid() == middle:
        time.sleep(0.001)
    die_with_parent()
    if os.getppid() != parent:  # it was killed meanwhile
        os._exit(InterruptedRunError.exit_code)
    return True


def end_server() -> None:
    """Kill the server that forked this process, if one did, and wait until its memory is free."""
    for server, watching in _server:
        os.kill(server, signal.SIGKILL)
        os.read(watching, 1)  # the kernel closes a process's files after it has freed its memory
