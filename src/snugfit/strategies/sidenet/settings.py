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
        side_width: width of the side network; ``propose`` fills in None.
        side_lr: its peak learning rate; five times the workload's if None.
        prune: ``auto``, ``on``, ``off`` or a ratio; ``propose`` replaces ``auto``, here and below.
        prune_importance: criterion by which channels are chosen.
        retrain_epochs: passes over the images in which the pruned network learns its former outputs.
        retrain_data: images for these passes; the training images if None.
        sample_wise: whether memory-bound frozen blocks run image by image.
        weight_storage: how frozen weights are stored.
        retrain_batch: images in memory at once during retraining; filled in by ``propose``.
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
            raise UsageError(f"--prune requires a side network, which --scheme {self.scheme} does not have.")
        if self.scheme == "bias+head" and self.sample_wise == "on":
            raise UsageError("--sample-wise on: blocks whose biases train (--scheme bias+head) cannot run by sample.")

    @property
    def candidates(self) -> tuple[Configuration, ...]:
        """The configurations that the options allow, by expected loss of accuracy."""
        options = (self.side_width, self.prune, self.sample_wise, self.weight_storage)
        return tuple(configurations(self.scheme, *options))

    @property
    def configuration(self) -> Configuration:
        """The configuration that ``propose`` filled in."""
        return self.candidates[0]
