"""The callback in transformers' Trainer: budgets that hold, the weights of the whole batch, and one clear error."""

import sys

import pytest
from impossible_budgets import refusal

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is enforced here")


def trainer_of(batch_size=32, side=32, layers=4):
    """A trainer of a small vision transformer in float64, for two epochs of 2.5 batches."""
    import tempfile

    import torch
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    class Images(torch.utils.data.Dataset):
        def __init__(self):
            torch.manual_seed(1)
            self.images = torch.randn(batch_size * 5 // 2, 3, side, side).double()

        def __len__(self):
            return len(self.images)

        def __getitem__(self, index):
            return {"pixel_values": self.images[index], "labels": index % 10}

    sizes = {"hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 128}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**sizes, **dropouts, image_size=side, patch_size=4, num_labels=10))
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=batch_size,
        num_train_epochs=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="epoch",
        dataloader_pin_memory=False,
    )
    return Trainer(model.double(), arguments, train_dataset=Images(), eval_dataset=Images())


def compared(memory, **options):
    """The record of a training in a budget, and how far its weights are from those of the plain trainer."""
    from snugfit.integrations.huggingface import MemoryBudget

    trainer, other = trainer_of(**options), trainer_of(**options)
    budget = MemoryBudget(trainer, memory)
    trainer.add_callback(budget)
    trainer.train()
    other.train()
    pairs = zip(trainer.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    distance = max(float((each - expected).abs().max()) for each, expected in pairs)
    return {**vars(budget.budget.record), "distance": distance, "evaluates": trainer.args.per_device_eval_batch_size}


def fitted():
    import snugfit

    trainer_of()  # what it imports is at rest
    snugfit.prepare_process(1)
    return [compared("1GB"), compared("40MB")]


def refused():
    trainer_of()
    return refusal(compared)


def interrupted():
    """Whether an exception in training restores the limit."""
    import resource

    import snugfit
    from snugfit.integrations.huggingface import MemoryBudget

    trainer_of()  # what it imports is at rest
    snugfit.prepare_process(1)
    trainer, before = trainer_of(), resource.getrlimit(resource.RLIMIT_DATA)
    trainer.add_callback(budget := MemoryBudget(trainer, "1GB"))
    trainer.data_collator = None
    try:
        with budget:
            trainer.train()
    except TypeError:
        return resource.getrlimit(resource.RLIMIT_DATA) == before


def interrupted_twice():
    """Whether the limit is lifted if an exception ends a training and the next one is closed."""
    import resource

    import snugfit
    from snugfit.integrations.huggingface import MemoryBudget

    trainer_of()  # what it imports is at rest
    snugfit.prepare_process(1)
    trainer, before = trainer_of(), resource.getrlimit(resource.RLIMIT_DATA)
    trainer.add_callback(budget := MemoryBudget(trainer, "1GB"))
    for _ in range(2):
        budget.on_train_begin(trainer.args, trainer.state, trainer.control)
    limited = resource.getrlimit(resource.RLIMIT_DATA) != before
    budget.close()
    return limited and resource.getrlimit(resource.RLIMIT_DATA) == before


def assert_bounded(record):
    assert record["enforced"] and record["steps"] == 6
    assert 0 < record["measured_bytes"] <= record["predicted_bytes"] <= record["budget_bytes"], record


def test_a_budget_holds_and_weights_are_those_of_the_whole_batch(fresh_process):
    whole, parts = found = fresh_process(fitted, helpers=(trainer_of, compared))["fitted"]
    for record in found:
        assert_bounded(record)
        assert record["distance"] < 1e-10
    assert whole["micro_batches"] == 1 < parts["micro_batches"]
    assert whole["evaluates"] == 8, "transformers' default"
    assert parts["evaluates"] == min(parts["micro_batch"], 8)


def test_an_impossible_budget_says_what_is_needed(fresh_process):
    found = fresh_process(refused, helpers=(trainer_of, compared, refusal))["refused"]
    assert "ViTForImageClassification does not fit memory=9.0 MB" in found["message"] and found["restored"]
    assert_bounded(found["record"])


def test_recomputation_is_the_models_own():
    from snugfit.integrations.huggingface import Checkpointing

    model = trainer_of().model
    checkpointing = Checkpointing(model, enabled=False)
    for schedule, enabled in (*((each, True) for each in checkpointing.schedules), ("", False)):
        checkpointing.use(schedule)
        assert model.is_gradient_checkpointing == enabled
    assert checkpointing.schedules and not Checkpointing(model, enabled=True).schedules


def test_an_exception_in_training_restores_the_limit(fresh_process):
    assert fresh_process(interrupted, helpers=(trainer_of,))["interrupted"]


def test_a_training_after_an_exception_restores_the_limit(fresh_process):
    assert fresh_process(interrupted_twice, helpers=(trainer_of,))["interrupted_twice"]


def test_a_search_for_batch_sizes_is_refused():
    from snugfit.errors import UsageError
    from snugfit.integrations.huggingface import MemoryBudget

    trainer = trainer_of()
    trainer.args.auto_find_batch_size = True
    with pytest.raises(UsageError, match="without auto_find_batch_size"):
        MemoryBudget(trainer, "1GB")


def dropping():
    import snugfit
    from snugfit.errors import UsageError
    from snugfit.integrations.huggingface import MemoryBudget

    trainer_of()  # what it imports is at rest
    snugfit.prepare_process(1)
    trainer = trainer_of()
    trainer.args.dataloader_drop_last = True
    MemoryBudget(trainer, "1GB").close()
    try:
        MemoryBudget(trainer, "35MB")
    except UsageError as error:
        return str(error)


def test_a_dropped_last_batch_is_refused_where_batches_are_divided(fresh_process):
    found = fresh_process(dropping, helpers=(trainer_of,))["dropping"]
    assert "dataloader_drop_last drops part of a micro-batch" in found
