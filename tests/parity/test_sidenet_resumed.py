"""An interrupted run of ``sidenet`` ends as the uninterrupted one does, whichever phase it was stopped in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import snugfit
from snugfit._storage.checkpoint import CheckpointStore
from snugfit.errors import CheckpointError, InterruptedRunError
from snugfit.strategies.sidenet.retraining import PRUNED_FILE

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
import tiny_nets

pytestmark = pytest.mark.usefixtures("measured_once")

OPTIONS: dict[str, Any] = {
    "strategy": "sidenet", "image_size": 32, "epochs": 2, "max_train": 32, "max_val": 20, "batch_size": 16,
    "prune": "0.5", "sample_wise": "off", "weight_storage": "int8", "side_width": 1.0, "threads": 1,
}  # fmt: skip


def plan(**changed: Any) -> Any:
    return snugfit.plan(tiny_nets.cnn, "digits", **{**OPTIONS, **changed})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Tensor], Path]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return plan().run((), out=folder), load_file(folder / "model.safetensors"), folder


class Stops(RuntimeError):
    """Stands for a process that is killed."""


@pytest.mark.parametrize("saves", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 4))])
def test_resumed_is_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Any, dict[str, Tensor], Path], saves: int
) -> None:
    """Killed right after a checkpoint: amid retraining, at its end, and in the first epoch of fine-tuning."""
    record, expected, _ = whole
    save, count = CheckpointStore.save, 0

    def saving(self: CheckpointStore, *arguments: Any) -> Path:
        nonlocal count
        found = save(self, *arguments)
        count += 1
        if count == saves:
            raise Stops
        return found

    torch.manual_seed(0)
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "save", saving)
        with pytest.raises(Stops):
            plan().run((), out=tmp_path / "run")
    kept = snugfit.resume(tmp_path / "run", (), model=tiny_nets.cnn)
    assert [phase.name for phase in kept.phases] == ["prune", "fine-tune"]
    assert kept.accuracy == record.accuracy
    found = load_file(tmp_path / "run" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_loaded_model_is_the_trained_one(whole: tuple[Any, dict[str, Tensor], Path]) -> None:
    record, expected, folder = whole
    images = torch.randn(3, 1, 32, 32)
    loaded = snugfit.load(folder, tiny_nets.cnn)
    trained = record.model
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), trained.eval()(images))
    assert {name: tensor.shape for name, tensor in loaded.state_dict().items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert all(tensor.dtype != torch.int8 for tensor in expected.values())
    for name, (before, after) in record.settings["widths"].items():
        assert loaded.state_dict()[f"{name}.weight"].shape[0] == after < before
    assert record.parameters["trained_model"] == sum(p.numel() for p in loaded.parameters())


def test_a_lost_file_of_pruned_blocks_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from snugfit.strategies.sidenet import strategy

    def stop(*arguments: Any, **more: Any) -> None:
        raise InterruptedRunError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(strategy, "train_network", stop)
        with pytest.raises(InterruptedRunError):
            plan(retrain_epochs=0).run((), out=tmp_path / "run")
    (tmp_path / "run" / PRUNED_FILE).unlink()
    with pytest.raises(CheckpointError, match=PRUNED_FILE):
        snugfit.resume(tmp_path / "run", (), model=tiny_nets.cnn)
