"""Networks that take several inputs train as in plain PyTorch, within their budget, and are resumed and loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_helpers import assert_same, interrupt
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import snugfit
from snugfit._core.registry import strategies
from snugfit.errors import CheckpointError, InfeasibleBudgetError, ModelError, UsageError

OPTIONS: dict[str, Any] = {
    "strategy": "backprop", "epochs": 2, "batch_size": 8, "threads": 1, "schedule": "constant", "seed": 3,
}  # fmt: skip


class Patients(Dataset[tuple[tuple[Tensor, ...], int]]):
    """A photo, three measurements, and the number of a clinic."""

    def __init__(self, count: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.photos = torch.randn(count, 2, 8, 12, generator=generator)
        self.numbers = torch.randn(count, 3, generator=generator)
        self.clinics = torch.randint(5, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.photos)

    def inputs(self, index: Any) -> tuple[Tensor, ...]:
        return self.photos[index], self.numbers[index], self.clinics[index]

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], int]:
        return self.inputs(index), index % 2


class Named(Patients):
    """The same as dictionaries, with a key that is no input."""

    def __getitem__(self, index: int) -> Any:
        photo, numbers, clinic = self.inputs(index)
        return {"id": "x", "clinic": clinic, "photo": photo, "numbers": numbers, "label": index % 2}


class Fused(nn.Module):
    """Computes in the type of its weights, views the photo as one that a loader has made, and masks a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.clinics = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Embedding(5, 2)
        self.head = nn.Linear(4 + 3 + 2, 2)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))

    def forward(self, photo: Tensor, numbers: Tensor, clinic: Tensor) -> Tensor:
        assert (photo.shape[1:], numbers.shape[1:], clinic.shape[1:]) == ((2, 8, 12), (3,), ())
        kind = self.head.weight.dtype
        photo = (self.norm(self.conv(photo.to(kind))).relu().mean((2, 3)) + self.mask).softmax(1)
        return self.head(torch.cat([photo, numbers.to(kind), self.clinics(clinic)], 1))


class Divisible(Fused):
    """Can be divided where its inputs have met."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 9))

    def forward(self, photo: Tensor, numbers: Tensor, clinic: Tensor) -> Tensor:
        photo = (self.norm(self.conv(photo.double())).relu().mean((2, 3)) + self.mask).softmax(1)
        return self.head(self.more(torch.cat([photo, numbers.double(), self.clinics(clinic)], 1)).relu())


def network(make: type[nn.Module] = Fused) -> nn.Module:
    torch.manual_seed(0)
    return make().double() if make is Divisible else make()


WAYS = [(Fused, "backprop"), (Divisible, "backprop"), (Divisible, "checkpoint")]


def pairs() -> Any:
    return Patients(), Patients(8)


def dictionaries() -> Any:
    return snugfit.from_dataset(Named(), Named(8), inputs=("photo", "numbers", "clinic"))


def plan(data: Any = None, model: nn.Module | None = None, **options: Any) -> Any:
    return snugfit.plan(model or network(), data or pairs(), **{**OPTIONS, **options})


@pytest.mark.parametrize("data", [pairs, dictionaries])
@pytest.mark.parametrize(("make", "strategy"), WAYS)
def test_a_run_equals_the_plain_loop_in_float64(
    make: type[nn.Module], strategy: str, data: Any, tmp_path: Path
) -> None:
    theirs, patients = network(make).double(), Patients()
    planned = plan(data(), network(make).double(), strategy=strategy)
    assert bool(planned.assembly.chain.units) == (make is Divisible)
    planned.run((), out=tmp_path / "run")
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for epoch in range(2):
        for rows, labels in planned.assembly.training_data().train.epoch(epoch, 8):
            photos = rows.flatten(1)[:, :192]
            chosen = torch.cdist(photos, patients.photos.flatten(1)).argmin(1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(theirs(*patients.inputs(chosen)), labels).backward()
            optimizer.step()
    assert_same(load_file(tmp_path / "run" / "model.safetensors"), theirs.state_dict(), tolerance=1e-10)


@pytest.mark.parametrize("data", [pairs, dictionaries])
def test_the_trained_model_is_a_plain_module_of_several_inputs(data: Any, tmp_path: Path) -> None:
    given = network()
    record = plan(data(), given).run((), out=tmp_path / "run")
    loaded, fresh, inputs = snugfit.load(tmp_path / "run", model=network()), network(), Patients().inputs(slice(4))
    fresh.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    for model in (record.model, loaded):
        assert type(model) is Fused and not model._forward_pre_hooks and not model.training
        assert torch.equal(model(*inputs), fresh.eval()(*inputs))
        assert torch.equal(model(inputs[0], clinic=inputs[2], numbers=inputs[1]), fresh(*inputs))
    assert not given._forward_pre_hooks
    right = (loaded(*Patients(8).inputs(slice(8))).argmax(1) == torch.arange(8) % 2).double().mean()
    assert record.accuracy["val"] == right


def test_a_trained_model_of_units_takes_several_inputs(tmp_path: Path) -> None:
    record, inputs = plan(dictionaries(), network(Divisible)).run((), out=tmp_path / "run"), Patients().inputs(slice(4))
    fresh = network(Divisible).eval()
    fresh.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    named = dict(zip(("photo", "numbers", "clinic"), inputs, strict=True))
    assert torch.equal(record.model(**named), fresh(*inputs)) and torch.equal(record.model(*inputs), fresh(*inputs))
    by_place = plan(pairs(), network(Divisible)).run((), out=tmp_path / "places").model
    assert torch.equal(by_place(*inputs), by_place(**named))
    assert by_place.state_dict().keys() == fresh.state_dict().keys()


def test_a_trained_model_of_units_takes_inputs_in_the_order_of_its_forward_pass(tmp_path: Path) -> None:
    data = snugfit.from_dataset(Named(), Named(8), inputs=("clinic", "numbers", "photo"))
    record, inputs = plan(data, network(Divisible)).run((), out=tmp_path / "run"), Patients().inputs(slice(4))
    fresh = network(Divisible).eval()
    fresh.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert torch.equal(record.model(*inputs), fresh(*inputs))


@pytest.mark.parametrize(("make", "strategy"), WAYS)
def test_a_resumed_run_ends_with_the_same_bits(make: type[nn.Module], strategy: str, tmp_path: Path) -> None:
    plan(None, network(make), strategy=strategy).run((), out=tmp_path / "whole")
    interrupt(plan(None, network(make), strategy=strategy), tmp_path / "run")
    with pytest.raises(CheckpointError, match="model or data have changed"):
        snugfit.resume(tmp_path / "run", (), model=network(make), data=dictionaries())
    snugfit.resume(tmp_path / "run", (), model=network(make), data=pairs())
    assert_same(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run")))


MEMORY = """
import json, sys
sys.path[:0] = sys.path_of_tests
import snugfit
from test_several_inputs import Deep, Large, OPTIONS
snugfit.prepare_process(1)
for memory, strategy in (("60MB", "backprop"), ("22MB", "backprop"), ("18MB", "checkpoint")):
    options = {**OPTIONS, "batch_size": 32, "memory": memory, "strategy": strategy}
    record = snugfit.plan(Deep(), (Large(), Large()), **options).run((), out=memory)
    print(json.dumps([record.measured["peak_bytes"], record.predicted["peak_bytes"], record.budget["memory_bytes"],
        record.settings["micro_batches"]]))
"""


class Large(Patients):
    """Photos of a size that a budget feels."""

    def __init__(self, count: int = 64) -> None:
        super().__init__(count)
        self.photos = torch.randn(1, 3, 64, 48).expand(count, -1, -1, -1)


class Deep(Fused):
    """Reads two photos and measurements, with norms of the batch."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)]
        self.conv = nn.Sequential(*layers)

    def forward(self, photo: Tensor, numbers: Tensor, clinic: Tensor) -> Tensor:
        values = (self.conv(photo).relu().mean((2, 3)) + self.mask).softmax(1)
        return self.head(torch.cat([values, numbers, self.clinics(clinic)], 1))


def test_runs_stay_within_prediction_and_budget(tmp_path: Path) -> None:
    """In a process of their own: what other tests leave in memory would count."""
    code = MEMORY.replace("sys.path_of_tests", repr(sys.path))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 3, done.stderr
    for measured, predicted, budget, _ in found:
        assert 0 < measured <= predicted <= budget, found
    assert found[0][3] == 1 < found[1][3], "the smaller budget divides the batch"


def test_every_strategy_that_needs_units_says_so() -> None:
    for name in set(strategies()) - {"backprop"}:
        planned = plan(strategy=name, time_ratio=0.5 if name == "elastic" else None)
        (candidate,) = planned.plan.candidates
        said = "needs units, and Fused cannot be divided: Fused cannot be traced"
        assert candidate.reasons[0].startswith(said)
        with pytest.raises(InfeasibleBudgetError, match=said):
            planned.run(())
    for name in set(strategies()) - {"backprop", "checkpoint"}:
        planned = plan(None, network(Divisible), strategy=name, time_ratio=0.5 if name == "elastic" else None)
        (candidate,) = planned.plan.candidates
        assert candidate.reasons == ("needs a network of one input, and this one takes several",)
    exact = plan((Large(), Large()), Deep(), batch_norm="exact").plan.candidates[0]
    assert exact.reasons[0] == "--batch-norm exact: needs a network of one input, and this one takes several"
    chosen = plan(strategy="auto").plan.choice
    assert chosen is not None and (chosen.strategy, chosen.exact) == ("backprop", True)


class Photo(nn.Module):
    """Takes one input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3)

    def forward(self, photo: Tensor) -> Tensor:
        return self.conv(photo).mean((2, 3))


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"Photo does not run on inputs 2x8x12 of float32, 3 of float32 and a number of"
    ):
        plan(model=Photo())
    with pytest.raises(ModelError, match=r"photo 2x8x12 .*unexpected keyword argument 'numbers'"):
        plan(dictionaries(), Photo())
    with pytest.raises(ModelError, match=r"Fused.forward takes more than one input .* \(\(a, b\), label\)"):
        plan(snugfit.from_dataset([(torch.zeros(2, 8, 12), number % 2) for number in range(20)], as_is=True))
    with pytest.raises(UsageError, match=r"--mixup 0.2 mixes images, and the items of dataset have several inputs"):
        plan(mixup=0.2)
    with pytest.raises(UsageError, match=r"--erase 0\.5 augments"):
        plan(erase=0.5)


def test_what_reads_files_or_exports_one_image_is_refused(tmp_path: Path) -> None:
    plan().run((), out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"prepared.*take the model by snugfit\.load"):
        list(snugfit.predict(tmp_path / "run", tmp_path, model=network()))
    with pytest.raises(ModelError, match=r"several inputs, and ONNX.*--format safetensors"):
        snugfit.export(tmp_path / "run", tmp_path / "out", model=network())
    files = snugfit.export(tmp_path / "run", tmp_path / "out", format="safetensors", model=network())["files"]
    assert load_file(files[0]).keys() == network().state_dict().keys()


def test_a_loader_of_pairs_is_read_as_its_data_set(tmp_path: Path) -> None:
    record = plan((DataLoader(Patients(), 4), DataLoader(Patients(8), 4))).run((), out=tmp_path / "run")
    assert record.workload["inputs"][2] == {"shape": [], "dtype": "int64", "name": ""}
