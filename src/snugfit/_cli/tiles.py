"""``snugfit cluster plan``: how a network would be cut into tiles over a cluster, and what that takes."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Group, Parameter

from snugfit._cli.options import SHOW_ALL, OutputOptions
from snugfit._cli.output import note, print_json, print_tables
from snugfit._core import known
from snugfit._quantities import format_bytes, format_short_seconds
from snugfit.strategies.tiled.config import PlannedTileOptions, TileRequest

_GROUPS = {"chosen": "chosen", "one": "one group", "every": "a group per layer"}
_DEVICE_COLUMNS = "rank", "host", "tiles", "computes", "sends", "receives", "keeps of feature maps"
_GROUP_COLUMNS = (
    *("groups", "step", "forward", "backward"),
    *("busiest computes", "halos of all", "exchanges", "keeps at most"),
)

AUTO = PlannedTileOptions()


def plan_cluster(
    *,
    request: Annotated[TileRequest, Parameter(name="*")],
    tiles: Annotated[PlannedTileOptions, Parameter(name="*", group=Group("Tiles", sort_key=2))] = AUTO,
    output: OutputOptions = SHOW_ALL,
) -> None:
    """Show how a network would be cut into tiles over a cluster, and what a training step takes; nothing is run.

    A tile of a layer's output needs a little more than a tile of its input: the halo. Groups of layers exchange halos
    once, and compute the overlap twice. Many small groups suit fast networks, few large ones slow networks or those
    with much latency; the table compares what was chosen with both ends. Seconds are predicted: all processes wait for
    the slowest after each exchange. Weights' optimizers are not in them.

    Measure a cluster, plan, and train with what was planned:

    ```
    snugfit cluster doctor --hosts hosts.yaml --out cluster.json
    snugfit cluster plan --cluster cluster.json --model yolov2_16 --image-size 608
    snugfit cluster launch --hosts hosts.yaml -- train --strategy tiled --cluster cluster.json --model yolov2_16
    ```

    Without a cluster, with processes and links as they typically are:

    ```
    snugfit cluster plan --processes 9 --tiles 3x3 --model yolov2_16 --image-size 608
    ```

    Args:
        request: the network and the cluster.
        tiles: how feature maps are cut.
        output: what is shown.
    """
    known.check_model(request.model)
    from snugfit.strategies.tiled.tile_costs import plan_tiles

    found = plan_tiles(request, tiles)
    if not output.quiet:
        print_tiles(found)
    if output.json:
        print_json(found)


def print_tiles(found: dict[str, Any]) -> None:
    """Print the figures of ``cluster plan --json`` as tables on stderr."""
    layers, predicted = found["tiled_layers"], found["predicted"]
    seconds = {key: format_short_seconds(value) for key, value in predicted.items() if key.endswith("seconds")}
    source = found["cluster"] or "typical, not measured"
    note(f"{found['model']}, {found['image_size']}x{found['image_size']}, batch of {found['batch_size']}; {source}")
    note(f"tiles    {found['tiles']}, over {found['processes']} processes, {found['tile_sizes']} sizes")
    note(f"layers   0-{len(layers)}: {layers[0]} to {layers[-1]}")
    note(f"forward  {found['forward_groups']}")
    note(f"backward {found['backward_groups']}")
    note(
        f"a step   {seconds['seconds']}: forward {seconds['forward_seconds']}, backward "
        f"{seconds['backward_seconds']}, weights {seconds['weight_seconds']}"
    )
    where = "every process" if found["rest"] == "replicated" else "the gateway"
    sending = f"{seconds['last_map_seconds']} for sending the last map and its gradient"
    note(f"the rest on {where}: {seconds['rest_seconds']}, and {sending}")
    print_tables(
        ("Devices, per step", _DEVICE_COLUMNS, map(_device_row, found["devices"])),
        ("Groups compared", _GROUP_COLUMNS, map(_group_row, found["compared"])),
    )


def _device_row(device: dict[str, Any]) -> list[str]:
    sizes = (format_bytes(device[key]) for key in ("sent_bytes", "received_bytes", "kept_bytes"))
    return [str(device["rank"]), device["host"], str(device["tiles"]), f"{device['macs'] / 1e9:.2f} GMAC", *sizes]


def _group_row(groups: dict[str, Any]) -> list[str]:
    seconds = (format_short_seconds(groups[f"{part}seconds"]) for part in ("", "forward_", "backward_"))
    computes, halos = f"{groups['macs'] / 1e9:.2f} GMAC", format_bytes(groups["halo_bytes"])
    exchanges, kept = str(groups["synchronisations"]), format_bytes(groups["kept_bytes"])
    return [_GROUPS[groups["groups"]], *seconds, computes, halos, exchanges, kept]
