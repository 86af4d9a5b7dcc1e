"""Checkpoints: exact, atomic, and honest about damage."""

import json
import resource
from pathlib import Path

import pytest
import safetensors.torch
import torch

from snugfit._storage import files
from snugfit._storage.checkpoint import CheckpointStore
from snugfit._storage.digests import Digester
from snugfit._storage.files import write_json_atomic
from snugfit._storage.tensor_file import read_tensors, write_tensors
from snugfit.errors import CheckpointError, OutOfStorageError

POSITION = {"epoch": 3, "step": 14, "loss": 0.1 + 0.2, "names": ["a", "b"], "best": None}


def tensors():
    torch.manual_seed(0)
    return {
        "map": torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last),
        "matrix": torch.randn(3, 7),
        "turned": torch.randn(3, 7).T,
        "strided": torch.randn(4, 6)[:, ::2],
        "half": torch.randn(5).half(),
        "brain": torch.randn(2, 3).bfloat16(),
        "step": torch.tensor(41.0),
        "count": torch.tensor(2**62 + 1),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "double": torch.randn(2, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert torch.equal(got[name], value), name


def test_round_trip(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoint")
    assert store.latest() is None
    store.save({"model": tensors(), "optimizer": {"w/step": torch.tensor(3)}, "nothing": {}}, POSITION)
    checkpoint = CheckpointStore(tmp_path / "checkpoint").latest()
    assert checkpoint.position == POSITION
    assert checkpoint.groups == ("model", "optimizer", "nothing")
    assert_same(checkpoint.load("model"), tensors())
    assert_same(checkpoint.load("optimizer"), {"w/step": torch.tensor(3)})
    assert checkpoint.load("nothing") == {}
    with pytest.raises(CheckpointError, match="no tensors 'other'"):
        checkpoint.load("other")


def test_memory_layout_and_gradients_are_as_they_should_be(tmp_path):
    parameter = torch.nn.Parameter(tensors()["map"])
    write_tensors(tmp_path / "t.safetensors", {"p": parameter}, along_memory=True)
    loaded = read_tensors(tmp_path / "t.safetensors")["p"]
    assert loaded.stride() == parameter.stride()
    assert not loaded.requires_grad
    loaded += 1
    assert torch.equal(read_tensors(tmp_path / "t.safetensors")["p"], parameter)


def test_files_are_safetensors_along_memory(tmp_path):
    given = tensors()
    size = write_tensors(tmp_path / "t.safetensors", given, along_memory=True).bytes
    assert size == (tmp_path / "t.safetensors").stat().st_size
    read = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert torch.equal(read.pop("map"), given.pop("map").permute(0, 2, 3, 1))
    assert torch.equal(read.pop("turned"), given.pop("turned").T)
    assert_same(read, given)


def test_reads_what_the_library_writes(tmp_path):
    given = {name: value.contiguous() for name, value in tensors().items()}
    safetensors.torch.save_file(given, tmp_path / "t.safetensors", metadata={"format": "pt"})
    assert_same(read_tensors(tmp_path / "t.safetensors"), given)


def test_only_the_newest_is_kept(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "²").touch()  # a digit, and no number
    for epoch in range(3):
        store.save({"model": {"w": torch.full((2,), float(epoch))}}, {"epoch": epoch})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002", "²"]
    assert store.latest().position == {"epoch": 2}


def saved_twice(folder):
    """A store whose second save dies before it becomes the newest."""
    store = CheckpointStore(folder)
    store.save({"model": {"w": torch.zeros(1000)}}, {"epoch": 0})
    return store


@pytest.mark.parametrize("moment", ["rename", "write", "json"])
def test_killed_while_saving_leaves_the_previous_one(tmp_path, monkeypatch, moment):
    class Killed(BaseException):
        pass

    def die(*_args, **_kwargs):
        raise Killed

    store = saved_twice(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("snugfit._storage.checkpoint.shutil.rmtree", lambda *_args, **_kwargs: None)
        target = {"rename": (Path, "rename"), "write": (Digester, "write"), "json": (files.json, "dump")}[moment]
        patch.setattr(*target, die)
        with pytest.raises(Killed):
            store.save({"model": {"w": torch.ones(1000)}}, {"epoch": 1})
    assert any(path.suffix == ".tmp" for path in tmp_path.iterdir())
    checkpoint = CheckpointStore(tmp_path).latest()
    assert checkpoint.position == {"epoch": 0}
    assert torch.equal(checkpoint.load("model")["w"], torch.zeros(1000))
    store.save({"model": {"w": torch.ones(1000)}}, {"epoch": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


def test_killed_before_the_older_one_was_deleted(tmp_path, monkeypatch):
    store = saved_twice(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("snugfit._storage.checkpoint.shutil.rmtree", lambda *_args, **_kwargs: None)
        store.save({"model": {"w": torch.ones(1000)}}, {"epoch": 1})
    assert store.latest().position == {"epoch": 1}
    path = tmp_path / "000001" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert store.latest().position == {"epoch": 0}


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


def garble(path):
    (path.parent / "position.json").write_text('{"format": 1, "files"')


def renumber(path):
    position = path.parent / "position.json"
    position.write_text(json.dumps({**json.loads(position.read_text()), "format": 99}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "truncated"),
        (Path.unlink, "is missing"),
        (flip_a_bit, "its digest is not"),
        (garble, "position.json"),
        (renumber, "format 99"),
    ],
)
def test_damage_is_an_error_that_says_so(tmp_path, damage, message):
    store = saved_twice(tmp_path)
    damage(tmp_path / "000000" / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        store.latest()


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0{}trailing"[:9], b"\x02\0\0\0\0\0\0\0[]"])
def test_what_is_no_tensor_file_is_an_error(tmp_path, content):
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_tensors(path)


def test_truncated_after_it_was_checked(tmp_path):
    store = saved_twice(tmp_path)
    checkpoint = store.latest()
    truncate(tmp_path / "000000" / "model.safetensors")
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.load("model")


def test_full_disk_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    store = saved_twice(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OutOfStorageError, match="no space left"):
            store.save({"model": {"w": torch.ones(1000)}}, {"epoch": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["000000"]
    assert store.latest().position == {"epoch": 0}


def test_json_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
