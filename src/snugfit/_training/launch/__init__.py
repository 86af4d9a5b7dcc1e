"""Distributed training: the processes, how they meet, and how a lost one is noticed and named.

Besides ``tiling`` this is the only package that uses ``torch.distributed``. torchrun starts the processes. A run's
gateway is rank 0, which hosts the store in which the others meet. Every wait has a limit::

    here = world()
    with join(here) as group, Heartbeat(here) as heartbeat, naming_lost(heartbeat):
        with Commands(heartbeat) as commands:
            ...  # the gateway gives commands, the others take them; all do collectives over group
"""

from snugfit._training.launch.commands import Commands
from snugfit._training.launch.group import gateway_device, join
from snugfit._training.launch.heartbeat import Heartbeat, naming_lost
from snugfit._training.launch.world import GATEWAY, World, share_of_threads, world

__all__ = [
    "GATEWAY",
    "Commands",
    "Heartbeat",
    "World",
    "gateway_device",
    "join",
    "naming_lost",
    "share_of_threads",
    "world",
]
