"""Overhead of the network between processes, added to steps that were measured in one process."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import torch
from torch import fx

from snugfit._core.hardware import Cluster
from snugfit._core.plan import Cost
from snugfit._core.workload import Workload
from snugfit._meta_device import flop_counter
from snugfit.strategies.memory_estimates import forward_images
from snugfit.strategies.micro_batch import VALIDATION_SHARE, MicroBatching
from snugfit.tiling.cost_counter import Placement, count_step_cost
from snugfit.tiling.exchange import cells_of
from snugfit.tiling.grouping import named_profile
from snugfit.tiling.layers import tiling_of
from snugfit.tiling.operators import TileablePrefix
from snugfit.tiling.plan import TilePlan, schedule_of
from snugfit.tiling.sequential import rest_of
from snugfit.tiling.step_cost import FLOAT, GATEWAY, Prediction, StepCost


@dataclass(frozen=True)
class NetworkOverhead:
    """Seconds of the other processes and of the network in addition to the gateway's own work, and bytes sent by all.

    Both are given per micro-batch (step), per image, and per update of weights.
    """

    step_seconds: float
    image_seconds: float
    update_seconds: float
    step_bytes: float
    image_bytes: float
    update_bytes: float

    def __str__(self) -> str:
        """Its text in the name of a probe."""
        return "/".join(f"{value:.6g}" for value in astuple(self))

    @classmethod
    def parse(cls, text: str) -> NetworkOverhead:
        """Parse the text of :meth:`__str__`."""
        return cls(*map(float, text.split("/")))

    def add_to(self, cost: Cost, workload: Workload, micro: MicroBatching, *, tracks: bool) -> Cost:
        """The cost of a run with this overhead in addition to ``cost``, that of the gateway's own work.

        ``tracks`` is as in :func:`snugfit.strategies.memory_estimates.forward_images`.
        """
        batch = micro.images(workload)
        steps = max(workload.train_count // batch, 1)
        images = steps * batch + VALIDATION_SHARE * forward_images(workload, tracks=tracks)
        epoch = steps * (micro.micro_batches * self.step_seconds + self.update_seconds) + images * self.image_seconds
        sent = steps * (micro.micro_batches * self.step_bytes + self.update_bytes) + images * self.image_bytes
        phases = tuple(replace(phase, seconds=phase.seconds + epoch * workload.epochs) for phase in cost.phases)
        return replace(
            cost,
            seconds_per_epoch=cost.seconds_per_epoch + epoch,
            seconds=cost.seconds + epoch * workload.epochs,
            sent_bytes=cost.sent_bytes + int(sent * workload.epochs),
            phases=phases,
        )


def rest_macs(module: fx.GraphModule, prefix: TileablePrefix) -> int:
    """Multiply-accumulates of an image's forward pass through the layers after the tiled ones.

    The weights of these layers go to the meta device.
    """
    rest, last = rest_of(module, prefix), prefix.layers.maps[-1]
    if rest is None:
        return 0
    images = torch.empty(2, last.channels, last.height, last.width, device="meta")  # norms refuse a single value
    with flop_counter() as counter, torch.no_grad():
        rest.to("meta")(images)
    return int(counter.get_total_flops()) // (2 * len(images))


def network_overhead(prefix: TileablePrefix, plan: TilePlan, cluster: Cluster, macs: int = 0) -> NetworkOverhead:
    """The overhead on a cluster: a line through steps of one image per replica and of two.

    ``macs`` is the result of :func:`rest_macs`.
    """
    few, more = (step_cost(prefix, plan, cluster, images * plan.replicas, macs) for images in (1, 2))
    seconds = _line(_seconds(few, cluster), _seconds(more, cluster), plan.replicas)
    sent = _line(_bytes(few), _bytes(more), plan.replicas)
    return NetworkOverhead(
        *seconds, Prediction(few, cluster).sending("weights"), *sent, update_bytes=FLOAT * few.total("weights")
    )


def _line(few: float, more: float, images: int) -> tuple[float, float]:
    """The intercept and the slope of a line through ``images`` and twice as many."""
    slope = max((more - few) / images, 0.0)
    return max(few - images * slope, 0.0), slope


def _seconds(step: StepCost, cluster: Cluster) -> float:
    """Seconds of a micro-batch without those in which the gateway computes."""
    found = Prediction(step, cluster)
    own = step.macs(GATEWAY) / cluster.ranks[GATEWAY].macs_per_second
    return found.seconds - found.sending("weights") - own


def _bytes(step: StepCost) -> float:
    """Bytes that all processes send in a micro-batch."""
    return FLOAT * (step.total() - step.total("weights"))


def step_cost(prefix: TileablePrefix, plan: TilePlan, cluster: Cluster, images: int, macs: int = 0) -> StepCost:
    """The cost of a training step on a batch of ``images`` for every process of a cluster.

    The layers of ``prefix`` are in training mode. ``macs`` is the result of :func:`rest_macs`.
    """
    layers, count = prefix.layers, len(prefix.operators)
    forward, backward = (named_profile(text, layers.cuts) for text in (plan.forward, plan.backward))
    tiling = tiling_of(layers, plan.grid, plan.shares)
    schedule = schedule_of(prefix, tiling, forward, backward, recompute=plan.recompute)
    cells = cells_of(tiling.tiles, plan.replicas, min(cluster.size, plan.cells))
    weights = sum(each.numel() for each in prefix.parameters(0, count) if each.requires_grad)
    return count_step_cost(
        schedule,
        cells,
        images,
        Placement(update=plan.update, rest=plan.rest),
        processes=cluster.size,
        weights=weights,
        rest_macs=macs,
    )
