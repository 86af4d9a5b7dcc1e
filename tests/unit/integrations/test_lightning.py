"""The callback in Lightning's own loop: budgets that hold, the weights of the whole batch, and one clear error."""

import sys

import pytest
from impossible_budgets import refusal

from snugfit.errors import UsageError

pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")


def module_of():
    """A module with a network of three convolutions, in float64; images (B, 3, 32, 32)."""
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))
            self.validated = []

        def training_step(self, batch, index):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, index):
            self.validated.append(len(batch[0]))
            self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]

    return Module().double()


def loader_of(count, batch_size):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(1)
    data = TensorDataset(torch.randn(count, 3, 32, 32).double(), torch.randint(10, (count,)))
    return DataLoader(data, batch_size=batch_size, shuffle=True)


def trainer_of(*callbacks, **options):
    import lightning.pytorch as pl

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2}
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), enable_checkpointing=False, **{**quiet, **options})


def distance(module, other):
    """Largest difference between the weights of two modules."""
    pairs = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((each - expected).abs().max()) for each, expected in pairs)


def compared(memory, network=False):
    """The record of a training in a budget, and how far its weights are from those of the plain loop."""
    import torch

    from snugfit.integrations.lightning import MemoryBudget

    module, loader = module_of(), loader_of(80, 32)
    budget = MemoryBudget(memory, module.net if network else None)
    trainer = trainer_of(budget)
    torch.manual_seed(2)
    trainer.fit(module, loader, loader_of(32, 32))
    other = module_of()
    torch.manual_seed(2)
    trainer_of().fit(other, loader, loader_of(32, 32))
    found = {"distance": distance(module, other), "validated": max(module.validated)}
    return {**vars(budget.budget.record), **found, "accumulates": trainer.accumulate_grad_batches}


def fitted():
    import snugfit

    trainer_of()  # what it imports is at rest
    snugfit.prepare_process(1)
    return [compared("1GB"), compared("35MB"), compared("35MB", network=True)]


def refused():
    trainer_of()
    return refusal(compared)


def started_again():
    """A second fit, when training has already taken steps, and validation of batches that would not fit whole."""
    import snugfit
    from snugfit.integrations.lightning import MemoryBudget

    trainer_of()  # what it imports is at rest
    snugfit.prepare_process(1)
    module, loader = module_of(), loader_of(64, 32)
    budget = MemoryBudget("35MB")
    records = []
    trainer = trainer_of(budget, max_epochs=1)
    for epochs in (1, 3):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, loader, loader_of(128, 128))
        records.append(vars(budget.budget.record))
    return {"records": records, "steps": trainer.global_step, "validated": max(module.validated)}


def estimating():
    """What a training has seen, if its optimizers need the number of its steps: a schedule over all of them."""
    import torch

    import snugfit
    from snugfit.integrations.lightning import MemoryBudget

    trainer_of()  # what it imports is at rest
    snugfit.prepare_process(1)
    module, seen, expected = module_of(), [], []

    def configure_optimizers():
        expected.append(module.trainer.estimated_stepping_batches)
        return torch.optim.SGD(module.parameters(), lr=0.05)

    module.configure_optimizers = configure_optimizers
    module.on_train_batch_end = lambda outputs, batch, index: seen.append(len(batch[0]))
    budget = MemoryBudget("35MB")
    trainer = trainer_of(budget)
    trainer.fit(module, loader_of(64, 32))
    again = trainer.estimated_stepping_batches
    return {"seen": sum(seen), "steps": trainer.global_step, "expected": [*expected, again], "parts": len(seen)}


def counting():
    """Steps and learning rates with settings that are shares of an epoch, or count batches; and with other steps."""
    from functools import partial

    import torch

    import snugfit
    from snugfit.integrations.lightning import MemoryBudget

    trainer_of()  # what it imports is at rest
    snugfit.prepare_process(1)
    found = []
    for memory in (None, "35MB"):
        module, validated = module_of(), []
        module.training_step = partial(lambda step, batch: step(batch, 0), module.training_step)  # without an index
        module.on_after_batch_transfer = lambda batch, index: (batch[0] / 2, batch[1])
        module.on_validation_start = lambda module=module, seen=validated: seen.append(module.trainer.global_step)
        scheduler = {"interval": "step", "frequency": 2}

        def configure_optimizers(module=module, scheduler=scheduler):
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), **scheduler}]

        module.configure_optimizers = configure_optimizers
        callbacks = [MemoryBudget(memory)] if memory else []
        trainer = trainer_of(*callbacks, limit_train_batches=0.75, val_check_interval=0.5, num_sanity_val_steps=0)
        trainer.fit(module, loader_of(256, 32), loader_of(32, 32))
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        found.append([trainer.global_step, rate, validated, trainer.limit_train_batches])
    return found, callbacks[0].budget.record.micro_batches


def crowded():
    """A loop that keeps memory is refused it; the error says so, and the limit is lifted."""
    import resource

    import torch

    import snugfit
    from snugfit.integrations.lightning import MemoryBudget

    trainer_of()  # what it imports is at rest
    snugfit.prepare_process(1)
    module, loader, kept = module_of(), loader_of(64, 32), []
    module.on_train_batch_end = lambda *_: kept.append(torch.ones(8_000_000, dtype=torch.uint8))
    budget, before = MemoryBudget("35MB"), resource.getrlimit(resource.RLIMIT_DATA)
    try:
        trainer_of(budget).fit(module, budget.loader(loader))  # as until 0.2
    except RuntimeError as error:
        notes = getattr(error, "__notes__", [""])
        return {"notes": notes, "restored": resource.getrlimit(resource.RLIMIT_DATA) == before}


HELPERS = (module_of, loader_of, trainer_of, distance, compared)


def assert_bounded(record):
    assert record["enforced"] and record["steps"] > 0
    assert 0 < record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"], record


def test_a_budget_holds_and_weights_are_those_of_the_whole_batch(fresh_process):
    found = fresh_process(fitted, helpers=HELPERS)["fitted"]
    for record in found:
        assert_bounded(record)
        assert record["accumulates"] == 1, "the trainer is left as it was"
        assert record["distance"] < 1e-10
        assert record["validated"] == record["micro_batch"]
    whole, parts, recomputing = found
    assert whole["micro_batches"] == 1 < parts["micro_batches"] and whole["steps"] == parts["steps"] == 6
    assert recomputing["micro_batches"] > 1 or recomputing["recomputation"]


def test_an_impossible_budget_says_what_is_needed(fresh_process):
    found = fresh_process(refused, helpers=(*HELPERS, refusal))["refused"]
    assert "Module does not fit memory=9.0 MB" in found["message"] and found["restored"]
    assert_bounded(found["record"])


def test_a_plan_does_not_depend_on_earlier_steps_nor_on_validation(fresh_process):
    """lightning#21903: a search after training had begun ran no batches. lightning#18985: one failed in validation."""
    found = fresh_process(started_again, helpers=HELPERS)["started_again"]
    first, second = found["records"]
    assert (first["steps"], second["steps"], found["steps"]) == (2, 4, 6)
    assert first["micro_batches"] > 1 and second["micro_batches"] > 1
    assert found["validated"] <= max(first["micro_batch"], second["micro_batch"])
    for record in (first, second):
        assert_bounded(record)


def test_all_images_are_seen_if_the_number_of_steps_is_asked_for_first(fresh_process):
    found = fresh_process(estimating, helpers=HELPERS)["estimating"]
    assert found["seen"] == 128 and found["parts"] > 4
    assert found["expected"] == [4, 4] and found["steps"] == 4


def test_shares_of_an_epoch_and_schedules_count_whole_batches(fresh_process):
    (plain, budgeted), parts = fresh_process(counting, helpers=HELPERS)["counting"]
    assert parts > 1 and plain == budgeted
    assert plain[:3] == [12, 2**-6, [3, 6, 9, 12]]


@pytest.mark.parametrize("option", ["overfit_batches", "reload_dataloaders_every_n_epochs"])
def test_loaders_that_are_made_anew_are_refused(option):
    from snugfit.integrations.lightning import MemoryBudget

    with pytest.raises(UsageError, match=f"leave {option} out"):
        trainer_of(MemoryBudget("1GB"), **{option: 1}).fit(module_of(), loader_of(64, 32))


def test_memory_that_the_loop_keeps_is_refused(fresh_process):
    found = fresh_process(crowded, helpers=HELPERS)["crowded"]
    assert found["restored"]
    if sys.version_info >= (3, 11):
        assert "was refused memory within memory=35.0 MB" in found["notes"][0]


def test_validation_before_the_first_fit_is_not_limited():
    from snugfit.integrations.lightning import MemoryBudget

    module = module_of()
    trainer_of(MemoryBudget("1GB")).validate(module, loader_of(8, 4), verbose=False)
    assert module.validated == [4, 4]


@pytest.mark.parametrize("loaders", [[], {"a": [1]}])
def test_training_needs_one_loader(loaders):
    from snugfit.errors import UsageError
    from snugfit.integrations.lightning import MemoryBudget

    with pytest.raises(UsageError, match=rf"batches of one DataLoader, not of {type(loaders).__name__}"):
        trainer_of(MemoryBudget("1GB")).fit(module_of(), loaders)


def with_loaders_of_a_module():
    """A training whose loaders come from a data module, as in lightning#18985, or from the module itself."""
    import lightning.pytorch as pl
    import torch

    import snugfit
    from snugfit.integrations.lightning import MemoryBudget

    class Data(pl.LightningDataModule):
        def setup(self, stage):
            self.train, self.val = loader_of(80, 32), loader_of(32, 32)

        def train_dataloader(self):
            return self.train

        def val_dataloader(self):
            return self.val

    trainer_of()  # what it imports is at rest
    snugfit.prepare_process(1)
    records = []
    for given in (True, False):
        module, budget = module_of(), MemoryBudget("35MB")
        if not given:
            module.train_dataloader = lambda: loader_of(80, 32)
        torch.manual_seed(2)
        trainer_of(budget).fit(module, **({"datamodule": Data()} if given else {}))
        other = module_of()
        torch.manual_seed(2)
        trainer_of().fit(other, loader_of(80, 32), *([loader_of(32, 32)] if given else []))
        validated = max(module.validated, default=0)
        records.append({**vars(budget.budget.record), "distance": distance(module, other), "validated": validated})
    return records


def test_loaders_may_come_from_a_data_module_or_the_module(fresh_process):
    of_data, of_module = fresh_process(with_loaders_of_a_module, helpers=HELPERS)["with_loaders_of_a_module"]
    for record in (of_data, of_module):
        assert_bounded(record)
        assert record["micro_batches"] > 1 and record["steps"] == 6 and record["distance"] < 1e-10
    assert (of_data["validated"], of_module["validated"]) == (of_data["micro_batch"], 0)
