"""What ``snugfit cluster plan`` plans."""

from __future__ import annotations

from dataclasses import dataclass

from snugfit._core.option_groups import Pixels
from snugfit._core.options import Checked, Count, Workers


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

    model: str
    image_size: Pixels
    batch_size: Count = 1
    classes: Count = 20
    cluster: str | None = None
    processes: Workers | None = None
