"""The strategy ``tiled``, described without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from snugfit._core.option_groups import BaseRequest, Pixels
from snugfit._core.options import (
    Checked,
    Choice,
    Common,
    Count,
    Rest,
    Text,
    TileSizes,
    WeightUpdate,
    Workers,
    help_of,
    with_help,
)
from snugfit._core.strategy_config import StrategyConfig
from snugfit.errors import UsageError
from snugfit.strategies.micro_batch import AccumulationOptions

Tiles = Annotated[
    str, Text("auto, or tiles down and across like 2x3", re.compile(r"auto|[1-9]\d{0,3}x[1-9]\d{0,3}").fullmatch)
]
Groups = Annotated[
    str,
    Text(
        "auto, one, every, or groups of layers like 0-4 | 4-11 | 11-16",
        re.compile(r"auto|one|every|\s*\d+-\d+\s*(\|\s*\d+-\d+\s*)*").fullmatch,
    ),
]


@dataclass(frozen=True)
class TileOptions(Checked):
    """How feature maps are cut into tiles.

    Attributes:
        tiles: number of tiles that ``tiled`` cuts feature maps into, down and across, like 2x3; by default as many as
            there are processes, or on one process the number that the memory budget requires.
        forward_groups: groups of layers of ``tiled`` between which tiles exchange halos in the forward pass, like
            ``0-4 | 4-11 | 11-16``, or one, every (layer), or auto (the groups that cost least). On one process, whole
            feature maps are kept between groups.
        backward_groups: the same in the backward pass.
        replicas: shares of the batch in ``tiled``, each of which has tiles of its own: 2 on 8 processes means 4 tiles
            for each half of the batch.
        recompute: whether ``tiled`` over several processes computes the feature maps that the backward pass reads
            again, group by group: on, off, or auto (if the budget requires it). One process always does.
        weight_update: where ``tiled`` updates weights: by all processes (all-reduce), or by the gateway, which sends
            them out: the others then have no optimizer.
        rest: which process computes the layers of ``tiled`` after the tiles: rank 0 (gateway), or every process, each
            of which is sent the whole last feature map and sends no gradient of it back (replicated).
        tile_sizes: tiles of ``tiled`` of equal size, or in proportion to the speeds of their devices (speed), as far
            as rows and columns allow; requires --cluster.
    """

    tiles: Annotated[Tiles, Common("RxC", "tiles down and across, like 2x3", ("cluster plan",))] = "auto"
    forward_groups: Groups = "auto"
    backward_groups: Groups = "auto"
    replicas: Workers = 1
    recompute: Choice = "auto"
    weight_update: WeightUpdate = "all-reduce"
    rest: Rest = "gateway"
    tile_sizes: TileSizes = "equal"


@dataclass(frozen=True)
class PlannedTileOptions(TileOptions):
    """Tiles over a cluster that is planned."""

    recompute: Choice = "off"


PlannedTileOptions.__doc__ = with_help("Tiles over a cluster that is planned.", help_of(TileOptions))


@dataclass(frozen=True)
class TileRequest(Checked):
    """A network, and the cluster over which it is cut into tiles.

    Attributes:
        model: a name (`vgg16`), `torchvision:NAME`, `timm:NAME` or `module:function` of your own.
        image_size: side of the square images in pixels.
        batch_size: images of a step.
        classes: of the model.
        cluster: file that `snugfit cluster doctor --out` wrote.
        processes: number of processes of 20 GMAC/s, on links of 100 MB/s and half a millisecond; or, with --cluster,
            how many it must describe.
    """

    model: Annotated[str, Common("NAME", "network: vgg16, timm:NAME or module:function; required")]
    image_size: Annotated[Pixels, Common("N", "side of the square images in pixels; required")]
    batch_size: Annotated[Count, Common("N", "images of a step; 1 by default")] = 1
    classes: Count = 20
    cluster: Annotated[str | None, Common("FILE", "what snugfit cluster doctor --out wrote")] = None
    processes: Annotated[Workers | None, Common("N", "or the number of typical processes")] = None


@dataclass(frozen=True)
class TiledOptions(TileOptions, AccumulationOptions):
    """How a network trains in tiles.

    Attributes:
        cluster: file that ``snugfit cluster doctor --out`` wrote; ``tiled`` chooses groups by these speeds and links,
            and adds the seconds that the network takes. Typical ones otherwise: 100 MB/s, half a millisecond.
        scratch: whether ``tiled`` on one process keeps whole feature maps in memory-mapped files in the cache folder,
            where they take storage instead of memory: on, off, or auto (if the memory budget requires it, with
            BatchNorm on batch statistics).
    """

    cluster: str | None = None
    scratch: Choice = "auto"


class Config(StrategyConfig):
    """Exact training whose leading layers run in tiles."""

    name = "tiled"
    implementation = "snugfit.strategies.tiled.strategy:Tiled"
    options = TiledOptions
    worker = "snugfit.strategies.tiled.runner:serve_task"
    order = 60
    exact = True
    rounds_state = True
    expected_loss = 0
    no_averaging = "because averaged weights would need whole feature maps"
    last_resort = "on one device tiles save memory and no time"

    def check_names(self, request: BaseRequest) -> None:
        """Check the file of a cluster, and what needs one.

        Raises:
            UsageError: there is no such file, or tiles are to follow speeds that it would name.
        """
        cluster = getattr(request.strategy, "cluster", None)
        if cluster is not None and not Path(cluster).is_file():
            raise UsageError(f"--cluster: there is no file {cluster}; `snugfit cluster doctor --out` writes one.")
        if cluster is None and getattr(request.strategy, "tile_sizes", "equal") == "speed":
            raise UsageError("--tile-sizes speed requires the speeds of a --cluster.")

    def contradiction(self, request: BaseRequest) -> str | None:
        """Processes exchange tiles in one type."""
        one = request.budget.devices == 1 or request.training.precision == "float32"
        return None if one else "several processes train tiles in --precision float32 only"

    def why_not(self, request: BaseRequest) -> str | None:
        """Why it is not considered: one device without a memory budget has nothing to save."""
        if request.budget.devices == 1 and not request.budget.limits_memory and super().why_not(request) is None:
            return "tiles need several --devices or a memory budget (--memory), and neither is set"
        return super().why_not(request)

    def is_last_resort(self, request: BaseRequest) -> bool:
        """On one device, tiles only save memory, and planning them takes long."""
        return request.budget.devices == 1

    def settings(self, request: BaseRequest) -> dict[str, Any]:
        """The number of processes, if the request names it."""
        return {"processes": request.budget.devices} if request.budget.devices > 1 else {}
