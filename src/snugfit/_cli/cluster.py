"""``snugfit cluster``: several processes or hosts that train together."""

from __future__ import annotations

from collections.abc import Callable

from cyclopts import App

from snugfit._cli.doctor import doctor
from snugfit._cli.launch import launch
from snugfit._cli.tiles import plan_cluster

HELP = """\
Train on several processes or hosts at once, and measure their network and processors.

How fast are the hosts, and the links between them?

    snugfit cluster doctor --hosts cluster.yaml --out cluster.json

How would a network be cut into tiles over them, and what would a step take?

    snugfit cluster plan --cluster cluster.json --model yolov2_16 --image-size 608

Train over all of them; rank 0, on the first host, has the data and writes the run folder:

    snugfit cluster launch --hosts cluster.yaml -- train --strategy tiled --model vgg16

Traffic is neither encrypted nor authenticated: for networks that you trust.
"""

_COMMANDS: dict[str, Callable[..., int | None]] = {"launch": launch, "doctor": doctor, "plan": plan_cluster}


def cluster_app(sort_key: int) -> App:
    """The command ``cluster`` with those below it."""
    app = App(name="cluster", help=HELP, help_format="plaintext", sort_key=sort_key)
    for order, (name, command) in enumerate(_COMMANDS.items()):
        app.command(command, name=name, sort_key=order, help_format="markdown")
    return app
