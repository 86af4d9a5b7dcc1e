"""The Trainer of transformers in a memory budget: four lines are new, marked by a comment."""

import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

import snugfit.integrations.huggingface  # new

BATCH, BUDGET = 64, "45MB"


class Images(Dataset[dict[str, Tensor]]):
    """Random images (3, 64, 64) with labels."""

    def __init__(self, count: int) -> None:
        self.images, self.labels = torch.randn(count, 3, 64, 64), torch.randint(10, (count,))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """An image (3, 64, 64) and its label, a scalar."""
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def main() -> None:
    """Train two epochs."""
    snugfit.prepare_process()  # new: the budget counts from here, before model and data exist
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        num_train_epochs=2,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    trainer = Trainer(ResNetForImageClassification(config), arguments, train_dataset=Images(192))
    budget = snugfit.integrations.huggingface.MemoryBudget(trainer, BUDGET)  # new
    trainer.add_callback(budget)  # new
    trainer.train()

    record = budget.budget.record
    print(f"images at once: {record.micro_batch} of {BATCH}; steps: {record.steps}")
    print(f"within the budget: {record.measured_bytes <= record.predicted_bytes <= 45_000_000}")


if __name__ == "__main__":
    main()
