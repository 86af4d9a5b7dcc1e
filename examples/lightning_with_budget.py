"""Lightning in a memory budget: four lines are new or changed, marked by a comment; the module stays as it is."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import snugfit.integrations.lightning  # new

BATCH, BUDGET = 64, "40MB"


class Classifier(pl.LightningModule):
    """Images (B, 3, 32, 32) to logits (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
        for _ in range(4):
            layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Mean loss (scalar) of images (B, 3, 32, 32) and their labels (B,)."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train two epochs."""
    snugfit.prepare_process()  # new: the budget counts from here, before model and data exist
    pl.seed_everything(0)
    module = Classifier()
    data = TensorDataset(torch.randn(192, 3, 32, 32), torch.randint(10, (192,)))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    budget = snugfit.integrations.lightning.MemoryBudget(BUDGET, network=module.net)  # new
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=[budget])  # changed
    trainer.fit(module, loader)

    record = budget.budget.record
    print(f"images at once: {record.micro_batch} of {BATCH}; steps: {record.steps}")
    print(f"within the budget: {record.measured_bytes <= record.predicted_bytes <= 40_000_000}")


if __name__ == "__main__":
    main()
