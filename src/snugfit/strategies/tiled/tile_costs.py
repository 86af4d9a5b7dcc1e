"""Predicted cost of tiled training on a cluster, from shapes and the cluster's measurements; nothing runs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, cast

import torch
from torch import fx

from snugfit import _models as models
from snugfit._chain import Chain
from snugfit._core.hardware import Cluster, read_cluster
from snugfit._version import SCHEMA
from snugfit.errors import UsageError
from snugfit.strategies.tiled.candidates import find_plans, typical_cluster
from snugfit.strategies.tiled.config import TileOptions, TileRequest
from snugfit.strategies.tiled.network_overhead import rest_macs, step_cost
from snugfit.strategies.tiled.strategy import Tiled
from snugfit.tiling.candidates import group_boundaries
from snugfit.tiling.grouping import every_cut, named_profile, one_group
from snugfit.tiling.operators import TileablePrefix
from snugfit.tiling.plan import TilePlan
from snugfit.tiling.step_cost import FLOAT, Prediction, StepCost
from snugfit.tiling.tileable_prefix import find_tileable_prefix


def plan_tiles(request: TileRequest, cut: TileOptions) -> dict[str, Any]:
    """Grid, grouping profiles, predicted seconds, and the computation, traffic and memory of every device.

    Raises:
        UsageError: the cluster's file cannot be used, or options contradict each other.
        ModelError: the model cannot be built, or no leading part of it can be tiled.
        UnknownNameError: there is no such model.
    """
    cluster = _choose_cluster(request, cut)
    if request.batch_size < cut.replicas:
        raise UsageError(
            f"--replicas {cut.replicas} requires a --batch-size of at least {cut.replicas}, not {request.batch_size}."
        )
    with torch.device("meta"):
        module = models.build(request.model, request.classes, request.image_size)
    chain = Chain.from_module(module, (3, request.image_size, request.image_size), request.model)
    traced = cast(fx.GraphModule, chain.to_module()).train()
    prefix = find_tileable_prefix(traced, chain.input_shape)
    plans = _plans(chain, prefix, request, cut, cluster)
    macs = rest_macs(traced, prefix)
    found = {
        name: Prediction(step_cost(prefix, plan, cluster, request.batch_size, macs), cluster)
        for name, plan in plans.items()
    }
    plan, chosen = plans["chosen"], found["chosen"]
    return {
        "schema": SCHEMA,
        **asdict(request),
        **asdict(cut),
        "measured": request.cluster is not None,
        "processes": cluster.size,
        "tiles": f"{plan.grid[0]}x{plan.grid[1]}",
        "forward_groups": plan.forward,
        "backward_groups": plan.backward,
        "recompute": plan.recompute,
        "tiled_layers": [each.name for each in prefix.layers.layers],
        "predicted": _seconds(chosen),
        "devices": [_device(chosen.cost, cluster, rank) for rank in range(cluster.size)],
        "compared": [_compared(name, plans[name], each) for name, each in found.items()],
    }


def _choose_cluster(request: TileRequest, cut: TileOptions) -> Cluster:
    """The measured cluster, or a typical one."""
    if request.cluster is not None:
        return read_cluster(request.cluster, request.processes)
    if request.processes is None or request.processes < 2:
        raise UsageError("name the processes: --cluster with a file of `snugfit cluster doctor`, or --processes 2.")
    if cut.tile_sizes == "speed":
        raise UsageError("--tile-sizes speed needs the devices' speeds: add --cluster with a file of them.")
    return typical_cluster(request.processes)


def _plans(
    chain: Chain, prefix: TileablePrefix, request: TileRequest, cut: TileOptions, cluster: Cluster
) -> dict[str, TilePlan]:
    """The chosen plan, one group, and a group per layer that reads more than single pixels."""
    strategy = Tiled(**asdict(cut), processes=cluster.size, cluster=request.cluster)
    chosen = next(iter(find_plans(chain, strategy, cluster, request.batch_size // strategy.replicas).values()))
    layers, groups = prefix.layers, (chosen.forward, chosen.backward)
    cuts = [group_boundaries(layers), group_boundaries(layers, "backward", apart=True)]
    profiles = {
        "chosen": [named_profile(each, layers.cuts) for each in groups],
        "one": [one_group(each) for each in cuts],
        "every": [every_cut(each) for each in cuts],
    }
    return {name: replace(chosen, forward=str(each[0]), backward=str(each[1])) for name, each in profiles.items()}


def _seconds(found: Prediction) -> dict[str, float]:
    return {
        "seconds": found.seconds,
        "forward_seconds": found.part("forward"),
        "backward_seconds": found.part("backward") + found.part("recompute"),
        "weight_seconds": found.sending("weights"),
        "rest_seconds": sum(each.computing for each in found.spans if each.stage.kind == "rest"),
        "last_map_seconds": found.sending("last map", "gradient"),
        "computing_seconds": found.computing(),
        "sending_seconds": found.sending(),
    }


def _device(step: StepCost, cluster: Cluster, rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": cluster.ranks[rank].host,
        "tiles": step.tiles[rank],
        "macs": step.macs(rank),
        "sent_bytes": FLOAT * step.sent(rank),
        "received_bytes": FLOAT * step.received(rank),
        "kept_bytes": step.kept_bytes[rank],
    }


def _compared(name: str, plan: TilePlan, found: Prediction) -> dict[str, Any]:
    step = found.cost
    return {
        "groups": name,
        "forward_groups": plan.forward,
        "backward_groups": plan.backward,
        **_seconds(found),
        "macs": max(step.macs(rank) for rank in range(step.processes)),
        "halo_bytes": FLOAT * step.total("forward halo", "backward halo", "recompute halo"),
        "synchronisations": step.synchronisations,
        "kept_bytes": max(step.kept_bytes),
    }
