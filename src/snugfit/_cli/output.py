"""What commands print (results on stdout, everything else on stderr), and from exceptions to exit codes."""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import sys
import traceback
from collections.abc import Iterable, Sequence
from shlex import quote
from typing import Any

from snugfit._report.wrapping import wrapped
from snugfit._version import SCHEMA
from snugfit.errors import (
    BudgetExceededError,
    InterruptedRunError,
    OutOfStorageError,
    SnugfitError,
    UsageError,
    is_out_of_memory,
    is_out_of_storage,
)


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object on one line of stdout; NaN and infinities become null."""
    print(json.dumps(_finite(data), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def note(message: str) -> None:
    """Print a line for people, on stderr."""
    print(wrapped(message, sys.stderr), file=sys.stderr)


def print_tables(*tables: tuple[str, Sequence[str], Iterable[Sequence[str]]]) -> None:
    """Print tables, each a title, columns and rows, on stderr, with an empty line between them."""
    from snugfit._report import tables as layout

    layout.print_tables(*(layout.make_table(*each) for each in tables))


class FailedError(SnugfitError):
    """An error as data, of this process or of the child.

    ``kind`` is the name of the original exception's class.
    """

    def __init__(self, kind: str, message: str, exit_code: int = 1) -> None:
        self.kind, self.exit_code = kind, exit_code
        super().__init__(message)

    def to_json(self) -> dict[str, Any]:
        """Keys ``code``, ``type`` and ``message``."""
        return {"code": self.exit_code, "type": self.kind, "message": str(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FailedError:
        """Inverse of :meth:`to_json`."""
        return cls(str(data["type"]), str(data["message"]), int(data["code"]))


def unreported(run_dir: str) -> InterruptedRunError:
    """The interruption of a run that is finished."""
    return InterruptedRunError(
        f"interrupted; the run in {run_dir} is finished, and only its report is missing.\n"
        f"`snugfit report {quote(run_dir)}` draws it."
    )


def explain(error: BaseException) -> FailedError:
    """Turn any exception into the error that the user sees.

    Exhausted memory and disks get the exit codes 5 and 6 wherever they occur; unforeseen errors get 1.
    """
    if isinstance(error, FailedError):
        return error
    known = _known(error)
    if known is not None:
        return FailedError(type(known).__name__, str(known), known.exit_code)
    name, lines = type(error).__name__, str(error).strip().splitlines()
    said = f"{name}: {lines[0][:300]}" if lines else name
    return FailedError(name, f"internal error, {said}\n--debug shows the traceback.")


def _known(error: BaseException) -> SnugfitError | None:
    if isinstance(error, SnugfitError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return InterruptedRunError("interrupted.")
    if isinstance(error, OSError) and is_out_of_storage(error):
        return OutOfStorageError(
            f"the disk is full ({error.filename or error.strerror}); free some space and try again."
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        shown = reprlib.repr(os.fsdecode(error.filename or ""))
        return UsageError(f"the path {shown} is longer than the file system allows; give a shorter one.")
    if is_out_of_memory(error):
        return BudgetExceededError(
            "memory ran out before or after training, under the limit that enforces the budget; "
            "give a larger --memory (or --total-memory) or a smaller --batch-size."
        )
    return None


def show_error(error: BaseException, *, as_json: bool, debug: bool) -> int:
    """Print an error on stderr, and with ``as_json`` as one JSON object on stdout; returns the exit code."""
    failed = explain(error)
    if debug and failed is not error:
        traceback.print_exception(error)
    note(f"error: {failed}")
    if as_json:
        print_json({"schema": SCHEMA, "error": failed.to_json()})
    return failed.exit_code
