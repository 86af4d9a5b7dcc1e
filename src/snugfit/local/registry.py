"""The local losses by name. A new local loss is one class and one line here."""

from __future__ import annotations

from collections.abc import Callable

from snugfit.errors import UnknownNameError
from snugfit.local.auxiliary import adaptive_auxiliary, classic_auxiliary
from snugfit.local.base import LocalLoss, NetworkFacts, UnitShape
from snugfit.local.linear import LinearLocalLoss

LOCAL_LOSSES: dict[str, Callable[[UnitShape, NetworkFacts], LocalLoss]] = {
    "aan": adaptive_auxiliary,
    "classic": classic_auxiliary,
    "linear": LinearLocalLoss,
}


def build_local_loss(name: str, unit: UnitShape, network: NetworkFacts) -> LocalLoss:
    """Build the local loss ``name`` for one unit, on the current default device.

    Raises:
        UnknownNameError: there is no local loss of that name.
    """
    if name not in LOCAL_LOSSES:
        raise UnknownNameError("local loss", name, LOCAL_LOSSES)
    return LOCAL_LOSSES[name](unit, network)
