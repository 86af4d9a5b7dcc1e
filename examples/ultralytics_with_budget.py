"""ultralytics in a memory budget: three lines are new, marked by a comment; its trainer stays as it is."""

import numpy as np
from PIL import Image
from ultralytics import YOLO

import snugfit.integrations.ultralytics  # new

BATCH, BUDGET = 64, "150MB"


def make_photos() -> None:
    """Write 128 noisy images (64 x 64) of each of two colours, and 16 to validate."""
    from pathlib import Path

    draw = np.random.default_rng(0)
    for split, count in (("train", 128), ("val", 16)):
        for channel, name in enumerate(("red", "green")):
            folder = Path("photos", split, name)
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                pixels = draw.integers(0, 128, (64, 64, 3), dtype=np.uint8)
                pixels[..., channel] += 100
                Image.fromarray(pixels).save(folder / f"{index}.png")


def main() -> None:
    """Train two epochs."""
    make_photos()
    snugfit.prepare_process()  # new: the budget counts from here, before the model exists
    model = YOLO("yolo11n-cls.yaml")
    budget = snugfit.integrations.ultralytics.MemoryBudget(model, BUDGET)  # new
    model.train(data="photos", epochs=2, imgsz=64, batch=BATCH, device="cpu", plots=False, project="runs")

    record = budget.budget.record
    print(f"images at once: {record.micro_batch} of {BATCH}; steps: {record.steps}")
    print(f"within the budget: {record.measured_bytes <= 150_000_000}")


if __name__ == "__main__":
    main()
