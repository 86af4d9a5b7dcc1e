"""Cost of training each tensor on this machine, as measured by ``elastic`` before a selection."""

from __future__ import annotations

from typing import Any

from snugfit._chain import Chain
from snugfit._core.profile import Profile, TensorProfile
from snugfit._core.serial import to_data
from snugfit._core.workload import Workload
from snugfit.errors import InfeasibleBudgetError
from snugfit.memory import MemoryLimit
from snugfit.profiling import Probe
from snugfit.selection.network import Network
from snugfit.strategies.elastic.probes import ElasticProbes
from snugfit.strategies.memory_estimates import MB, smallest_budget


def tensor_table(
    chain: Chain, workload: Workload, profile: Profile, limit: MemoryLimit, *, lean: bool = True
) -> dict[str, Any]:
    """Time every operator under each output mask (ElasticTrainer sections 3.2 and 5), then whole steps.

    The limit is enforced meanwhile; see :func:`tensor_rows` for the result.

    Raises:
        InfeasibleBudgetError: not even one image's operators fit the memory budget.
        ModelError: an operator cannot be run alone, or two read the same tensor.
    """
    probes = ElasticProbes(chain, workload, str(limit.device), lean)
    with limit:
        found = probes.tensors(probes.limit).measure(limit)
    if found is None:
        raise _infeasible(probes, profile, limit.budget_bytes or 0)
    return tensor_rows(found, workload.optimizer.state_per_parameter)


def tensor_rows(found: TensorProfile, state_copies: int = 1) -> dict[str, Any]:
    """A tensor profile in the form of ``snugfit profile --json``; seconds are those of the timed batch.

    Returns:
        ``tensors``: of each ``name``, ``operator`` and ``kind``, ``t_dw`` (its gradient and update), ``t_dy`` (from it
        to the tensor before), ``update_seconds`` (the update alone), ``parameters``, ``macs`` of its gradient and
        ``saved_bytes`` (kept because it trains), both per image. ``tensor_timing``: ``batch``, ``forward_seconds``
        without gradients, and ``steps``, whole steps as ``core.tensors.StepSeconds``; None where memory refuses them.
    """
    network = Network(found, found.batch, state_copies)
    rows = [
        {
            "name": tensor.name,
            "operator": found.operators[int(place)].name,
            "kind": found.operators[int(place)].kind,
            "t_dw": float(t_dw),
            "t_dy": float(t_dy),
            "update_seconds": tensor.update_seconds,
            "parameters": tensor.parameters,
            "macs": tensor.macs,
            "saved_bytes": sum(saved.bytes for saved in tensor.saved),
        }
        for tensor, place, t_dw, t_dy in zip(network.tensors, network.place, network.t_dw, network.t_dy, strict=True)
    ]
    timing = {"batch": found.batch, "forward_seconds": network.forward_seconds(), "steps": to_data(found.steps)}
    return {"tensors": rows, "tensor_timing": timing}


def _infeasible(probes: ElasticProbes, profile: Profile, allowed: int) -> InfeasibleBudgetError:
    """What would do: a whole step of one image takes more than each of its operators alone."""
    floors = [probe.floor(1) for probe in probes.all(None) if isinstance(probe, Probe)]
    smallest = max(smallest_budget(profile, max(floors)), allowed + MB)
    return InfeasibleBudgetError(
        "The network's operators cannot be timed within the memory budget.",
        closest="one image at a time",
        lacking_bytes=smallest - allowed,
        smallest_bytes=smallest,
    )
