"""The settings of ``sidenet``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snugfit._core.options import Choice
from snugfit.errors import UsageError
from snugfit.strategies.micro_batch import MicroBatching
from snugfit.strategies.sidenet.config import PruneImportance, WeightStorage
from snugfit.strategies.sidenet.config import SidenetScheme as Scheme
from snugfit.strategies.sidenet.configurations import Configuration, configurations


@dataclass(frozen=True)
class SidenetSettings(MicroBatching):
    """Settings of ``sidenet``.

    Attributes:
        scheme: what trains: ``rep-net`` a side network and the classifier, ``bias+head`` every bias and the classifier,
            ``head`` the classifier.
        side_width: width of the side network; filled in by ``propose`` where it is None.
        side_lr: its peak learning rate; five times the workload's where it is None.
        prune: ``auto``, ``on``, ``off`` or a ratio; ``auto`` is settled by ``propose``, like the next ones.
        prune_importance: what channels are chosen by.
        retrain_epochs: passes over the images in which the pruned network learns to do what it did before.
        retrain_data: other images to do so with; the training images where it is None.
        sample_wise: whether memory-bound frozen blocks run image by image.
        weight_storage: how frozen weights are kept.
        retrain_batch: images in memory at once while it retrains; filled in by ``propose``.
    """

    name: ClassVar[str] = "sidenet"
    exact: ClassVar[bool] = False

    scheme: Scheme = "rep-net"
    side_width: float | None = None
    side_lr: float | None = None
    prune: str = "auto"
    prune_importance: PruneImportance = "reconstruction"
    retrain_epochs: int = 8
    retrain_data: str | None = None
    sample_wise: Choice = "auto"
    weight_storage: WeightStorage = "auto"
    retrain_batch: int = 0

    def __post_init__(self) -> None:
        if self.scheme != "rep-net" and self.prune not in ("auto", "off"):
            raise UsageError(f"--prune serves a side network, which --scheme {self.scheme} does not have.")
        if self.scheme == "bias+head" and self.sample_wise == "on":
            raise UsageError("--sample-wise on: blocks whose biases train (--scheme bias+head) cannot run by sample.")

    @property
    def tried(self) -> tuple[Configuration, ...]:
        """The configurations that it may take, those that are expected to lose less first."""
        options = (self.side_width, self.prune, self.sample_wise, self.weight_storage)
        return tuple(configurations(self.scheme, *options))

    @property
    def configuration(self) -> Configuration:
        """The one that :meth:`propose` filled in."""
        return self.tried[0]
