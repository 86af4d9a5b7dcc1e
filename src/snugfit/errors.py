"""Every error that snugfit raises deliberately, and its exit code on the command line.

    SnugfitError                 1   internal error
    |-- UsageError               2   the call itself is wrong
    |   `-- UnknownNameError         a name that is not on the list (with the nearest one)
    |-- InfeasibleBudgetError    3   no strategy fits the budget
    |-- InfeasibleTimeError      3   none is fast enough
    |-- UnusableInputError       4   something given cannot be read or used
    |   |-- DataError                data set or image
    |   |-- ModelError               model, or chain that cannot be traced
    |   `-- CheckpointError          checkpoint, run folder or weights
    |-- BudgetExceededError      5   a run used more than its budget
    |-- OutOfStorageError        6   disk full, or storage budget reached
    |-- DivergedError            7   the loss became NaN or infinite
    |-- WorkerLostError          8   another process of the run died
    `-- InterruptedRunError    130   stopped by a signal; the run can be resumed

Each message says what happened, why, and what to do, in at most two lines.

>>> import snugfit
>>> try:
...     snugfit.Budget(memory="100 megs")
... except SnugfitError as error:
...     print(f"{error} (exit code {error.exit_code})")
'100 megs' is not a size; write it like 100MB (10^6 bytes) or 512MiB (2^20). (exit code 2)
"""

from __future__ import annotations

import difflib
import errno
import math
from collections.abc import Iterable

from snugfit._quantities import format_bytes

__all__ = [
    "BudgetExceededError",
    "CheckpointError",
    "DataError",
    "DivergedError",
    "InfeasibleBudgetError",
    "InfeasibleTimeError",
    "InterruptedRunError",
    "ModelError",
    "OutOfStorageError",
    "SnugfitError",
    "UnknownNameError",
    "UnusableInputError",
    "UsageError",
    "WorkerLostError",
]

LONGEST_MESSAGE = 2000
"""Most characters of a message; quoted content of files may have any length."""


class SnugfitError(Exception):
    """Base of all errors raised deliberately; ``exit_code`` is the exit code of the command line."""

    exit_code = 1

    def __str__(self) -> str:
        """The message, without its middle if it is longer than ``LONGEST_MESSAGE``."""
        text = super().__str__()
        half = LONGEST_MESSAGE // 2 - 3
        return text if len(text) <= LONGEST_MESSAGE else f"{text[:half]} ... {text[-half:]}"


class UsageError(SnugfitError, ValueError):
    """An invalid call: a malformed quantity, or contradicting options."""

    exit_code = 2


class UnknownNameError(UsageError):
    """An unknown name; the message suggests the nearest known one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        close = difflib.get_close_matches(name, self.known, n=1, cutoff=0.5)
        hint = f"Did you mean '{close[0]}'? " if close else ""
        super().__init__(f"unknown {kind} {shown(name)}. {hint}Known: {', '.join(self.known)}.")


def shown(value: object) -> str:
    """A given value for an error message: on one line, and shortened.

    >>> shown("adam"), shown(1.5), len(shown("x" * 1000))
    ("'adam'", '1.5', 80)
    """
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python prints, or an object of the caller's
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


class InfeasibleBudgetError(SnugfitError):
    """No candidate fits the budget.

    Attributes:
        message: the first sentence.
        closest: the candidate that comes closest, as text; "none" if no budget would be enough.
        lacking_bytes: bytes that this candidate lacks; 0 if no budget would be enough.
        smallest_bytes: the smallest memory budget that works, by the flag that bounds the memory.
    """

    exit_code = 3

    def __init__(
        self, message: str, *, closest: str, lacking_bytes: int, smallest_bytes: int, what: str = "budget"
    ) -> None:
        self.message = message
        self.closest, self.lacking_bytes, self.smallest_bytes = closest, lacking_bytes, smallest_bytes
        found = (
            f" Closest: {closest}, which lacks {format_bytes(lacking_bytes)}. "
            f"Smallest {what} that would do: {format_bytes(smallest_bytes)}."
        )
        super().__init__(message + (found if lacking_bytes > 0 else ""))


class InfeasibleTimeError(SnugfitError):
    """No selection of tensors is fast enough, or none within the budgets is useful.

    Attributes:
        smallest_ratio: the smallest time ratio that works; None if none does.
    """

    exit_code = 3

    def __init__(self, message: str, *, smallest_ratio: float | None, advice: str) -> None:
        self.smallest_ratio = None if smallest_ratio is None else math.ceil(smallest_ratio * 1000) / 1000
        smallest = "none" if smallest_ratio is None else f"{self.smallest_ratio:g}"
        super().__init__(f"{message}. Smallest time ratio that would do: {smallest}; or {advice}.")


class UnusableInputError(SnugfitError):
    """A file, data set, model or checkpoint that cannot be read or used."""

    exit_code = 4


class DataError(UnusableInputError):
    """A data set or image that is missing, corrupt or of the wrong shape."""


class ModelError(UnusableInputError):
    """A model that cannot be built, traced or trained as asked."""


class CheckpointError(UnusableInputError):
    """A checkpoint, run folder or weights file that is truncated or belongs to another model."""


class BudgetExceededError(SnugfitError):
    """The run needed, or was measured to use, more memory than its budget."""

    exit_code = 5


class OutOfStorageError(SnugfitError):
    """The disk is full or the storage budget is used up."""

    exit_code = 6


class DivergedError(SnugfitError):
    """A loss became NaN or infinite."""

    exit_code = 7


_OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "could not create a memory",
    "can't start new thread",
    "could not create a primitive",  # oneDNN, when the memory for its code is refused
    "could not execute a primitive",  # the same, for its scratch memory
)

MEMORY_ERRORS = (RuntimeError, MemoryError, SystemError, OSError)
"""Classes of the exceptions that :func:`is_out_of_memory` recognises."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception is an allocation that failed: Python's, the operating system's or one of torch's.

    torch raises RuntimeError for failed allocations, and MemoryError comes from Python and numpy. Python's compiler,
    which runs where a network's graph changes, may raise a SystemError without a cause, and so may any call.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, SystemError):
        return "without exception set" in str(error) or "without setting an exception" in str(error)
    if isinstance(error, RuntimeError):
        return any(part in str(error).lower() for part in _OUT_OF_MEMORY_TEXTS)
    return isinstance(error, MemoryError)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def reason_of(error: BaseException) -> str:
    """Class and first line of an error, without a full stop."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line.rstrip('.')}"


def is_out_of_storage(error: BaseException) -> bool:
    """Whether writing failed for lack of space: a full disk or quota, or a limit on file sizes (``ulimit -f``)."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WorkerLostError(SnugfitError):
    """A process of the run died or stopped answering."""

    exit_code = 8


class InterruptedRunError(SnugfitError):
    """The run was stopped by SIGINT or SIGTERM after its state was saved."""

    exit_code = 130
