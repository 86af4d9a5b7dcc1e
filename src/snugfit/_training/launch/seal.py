"""Authenticated messages in the store: torch's store has no passwords."""

from __future__ import annotations

import hashlib
import hmac

from snugfit.errors import WorkerLostError

SECRET_VARIABLE = "SNUGFIT_SECRET"
"""Set by the agent, which receives it from the launcher over ssh; no command line shows it."""


def seal(secret: str, key: str, text: str) -> str:
    """A text with a code that authenticates its writer and its key: HMAC-SHA256 in hexadecimal, then the text."""
    return f"{_code(secret, key, text)}{text}"


def unseal(secret: str, key: str, sealed: str) -> str:
    """Check a sealed text and return the text.

    Raises:
        WorkerLostError: it was written without the secret, or for another key.
    """
    length = 2 * hashlib.sha256().digest_size
    code, text = sealed[:length], sealed[length:]
    if not hmac.compare_digest(code.encode(), _code(secret, key, text).encode()):
        raise WorkerLostError(
            f"'{key}' in the store was not written by this launch and is ignored.\n"
            "Check who can reach the network of the hosts, and resume the run on a network that you trust."
        )
    return text


def _code(secret: str, key: str, text: str) -> str:
    return hmac.new(secret.encode(), f"{len(key)}:{key}{text}".encode(), hashlib.sha256).hexdigest()
