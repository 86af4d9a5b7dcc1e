"""Train a network of your own inside a memory budget, and use what comes out."""

import torch
from torch import nn

import snugfit


class SmallNet(nn.Module):
    """Three convolutions and a classifier, for grey images."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Linear(64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, 1, H, W) to logits (B, classes)."""
        return self.classifier(self.features(images).flatten(1))


def main() -> None:
    """Plan, train, and use the model."""
    snugfit.prepare_process()  # the budget counts from here: call it before the model is made
    budget = snugfit.Budget(memory="40MB")
    plan = snugfit.plan(SmallNet, "digits", budget, epochs=3, batch_size=32, lr=0.05, image_size=16)
    print(plan)

    record = plan.run()
    predicted, measured = record.predicted["peak_bytes"], record.measured["peak_bytes"]
    print(f"predicted {predicted / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB")
    print(f"test accuracy {record.accuracy['test']:.1%}, run folder {record.run_dir}")

    model = record.model  # a plain nn.Module in evaluation mode
    with torch.no_grad():
        print("logits of an empty image:", tuple(model(torch.zeros(1, 1, 16, 16)).shape))
    record.save("small_net.safetensors")


if __name__ == "__main__":
    main()
