"""The option ``scheme`` of several strategies; each has its own values."""

from __future__ import annotations

from collections.abc import Sequence

from snugfit._core.option_groups import BaseRequest
from snugfit.errors import UsageError


def require_scheme(strategy: str, schemes: Sequence[str], scheme: str | None) -> None:
    """Check the scheme of a request that names a strategy.

    Raises:
        UsageError: the strategy has no such scheme.
    """
    if scheme is not None and scheme not in schemes:
        raise UsageError(f"{strategy} has no scheme {scheme}; --scheme is {', '.join(schemes)} there.")


def foreign_scheme(schemes: Sequence[str], request: BaseRequest) -> str | None:
    """Why ``auto`` excludes a strategy that lacks the requested scheme; None if it has the scheme."""
    scheme = getattr(request.strategy, "scheme", None)
    return None if scheme is None or scheme in schemes else f"has no --scheme {scheme}"
