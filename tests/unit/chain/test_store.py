"""Weights of units on disk: round trips, damage, mismatches, a full disk, and memory."""

import errno
import json
import os
import shutil
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from chain_zoo import SHAPE, ZOO
from safetensors.torch import load_file, save_file
from torch import nn

from snugfit._chain import Chain, UnitStore, load_into, release
from snugfit._storage.digests import FileDigest
from snugfit._storage.manifest import Manifest
from snugfit._storage.tensor_file import write_tensors
from snugfit.errors import CheckpointError, OutOfStorageError
from snugfit.memory import read_status


@pytest.fixture
def chain():
    torch.manual_seed(0)
    return Chain.from_module(ZOO["bottlenecks"]().eval(), SHAPE)


@pytest.fixture
def store(tmp_path):
    return UnitStore(tmp_path / "units")


def test_round_trip_through_release(chain, store):
    x = torch.randn(2, *SHAPE)
    expected = chain(x)
    names = [store.save(index, unit).name for index, unit in enumerate(chain.all_units)]
    assert names[:2] == ["unit_000_conv1.safetensors", "unit_001_layer1.0.safetensors"]
    for unit in chain.all_units:
        unit.module.requires_grad_(False)
        release(unit)
        assert all(t.is_meta for t in unit.module.state_dict().values())
        assert not any(p.requires_grad for p in unit.module.parameters())
    for index, unit in enumerate(chain.all_units):
        load_into(unit, store.load(index))
        assert not any(p.requires_grad for p in unit.module.parameters())
    assert torch.equal(chain(x), expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool],
)
def test_file_is_what_safetensors_reads(store, dtype):
    torch.manual_seed(1)
    state = {
        "b.weight": (torch.randn(2, 3, 4, 5) * 3).to(dtype).to(memory_format=torch.channels_last),
        "a": torch.ones((), dtype=dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
        "count": torch.tensor(7),
        "sliced": torch.arange(12.0).view(3, 4)[:, 1:3],
    }
    path = store.save(4, state)
    assert path.name == "unit_004.safetensors"
    for read in (load_file(path), store.load(4), store.map(4)):
        assert read.keys() == state.keys()
        for name, tensor in state.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor), name
            assert read[name].is_contiguous()


def test_loaded_tensors_are_private(store):
    path = store.save(0, {"w": torch.zeros(4)})
    loaded = store.load(0)["w"]
    loaded.fill_(5)
    assert torch.equal(store.load(0)["w"], torch.zeros(4))
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(loaded, torch.full((4,), 5.0))


def test_saving_again_replaces_and_keeps_the_file_name(chain, store):
    first = store.save(1, chain.units[1])
    state = {name: tensor.clone().zero_() for name, tensor in chain.units[1].module.state_dict().items()}
    assert store.save(1, state) == first
    assert not any(tensor.any() for tensor in store.load(1).values())
    assert [path.name for path in store.folder.iterdir()] == [first.name]


def test_missing_units(store):
    store.save(1, {"w": torch.zeros(1)})
    assert store.path(1).is_file()
    for index in (0, 10):
        with pytest.raises(CheckpointError, match=f"no weights of unit {index} "):
            store.load(index)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:20], lambda b: b"", lambda b: b"\xff" * len(b)])
def test_truncated_or_corrupt_file(store, damage):
    path = store.save(0, {"w": torch.randn(64)})
    path.write_bytes(damage(path.read_bytes()))
    for read in (store.load, store.map):
        with pytest.raises(CheckpointError, match=r"unit_000\.safetensors is damaged"):
            read(0)


def test_the_folder_is_made_and_taken_as_it_is(tmp_path):
    UnitStore(tmp_path / "a" / "b").save(0, {"w": torch.zeros(2)})
    assert UnitStore(tmp_path / "a" / "b").path(0).is_file()


def test_characters_of_a_name_that_no_file_name_should_have(chain, store):
    path = store.save(0, replace(chain.units[0], name="Block/1 ä.B-2_c"))
    assert path.name == "unit_000_Block_1__.B-2_c.safetensors"


def test_what_is_saved_is_listed_in_the_manifest(tmp_path):
    path = UnitStore(tmp_path / "weights", Manifest(tmp_path)).save(3, {"w": torch.arange(5.0)})
    listed = Manifest.read(tmp_path)
    assert listed.names == ("weights/unit_003.safetensors",)
    assert listed.listed(listed.names[0]) == FileDigest.of(path)
    assert torch.equal(load_file(path)["w"], torch.arange(5.0))


def with_header(path, **changes):
    """A file of three numbers, whose header says something else."""
    text = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **changes}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    return 8 + len(text)


@pytest.mark.parametrize(
    "changes", [{"shape": [2]}, {"data_offsets": [0, 8]}, {"data_offsets": [-4, 8]}, {"shape": [-1, -3]}]
)
def test_sizes_that_disagree_are_refused(store, changes):
    with_header(store.save(0, {"w": torch.zeros(3)}), **changes)
    with pytest.raises(CheckpointError, match=r"sizes in its header disagree with each other|its tensors overlap"):
        store.map(0)


def test_metadata_of_another_writer_is_no_tensor(store):
    path = store.save(0, {"w": torch.zeros(3)})
    save_file({"w": torch.ones(3)}, path, metadata={"format": "pt"})
    assert store.map(0).keys() == store.load(0).keys() == {"w"}


def test_maps_give_no_warning_that_they_cannot_be_written(store):
    store.save(0, {"w": torch.zeros(3)})
    torch.set_warn_always(True)  # torch gives it once otherwise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.map(0)
    finally:
        torch.set_warn_always(False)


def test_tensors_of_all_sizes_lie_where_their_type_may(store):
    state = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(1, dtype=torch.float64)}
    state |= {"c": torch.zeros(3, dtype=torch.int16), "d": torch.zeros(1), "e": torch.zeros((), dtype=torch.int64)}
    for name in ("odd", "odder", "oddest", "even", "longer than that", *"stuvwxyz"):  # of headers of many lengths
        content = store.save(0, {**state, name: torch.zeros(1)}).read_bytes()
        length = int.from_bytes(content[:8], "little")
        assert length % 8 == 0
        for key, entry in json.loads(content[8 : 8 + length]).items():
            assert entry["data_offsets"][0] % state.get(key, torch.zeros(1)).itemsize == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_mapped_weights_take_no_private_memory(store):
    store.save(0, {"w": torch.ones(64, 1024, 64)})  # 16.8 MB
    before = read_status()
    mapped = store.map(0)["w"]
    assert mapped.sum() == 64 * 1024 * 64
    after = read_status()
    assert after.anon - before.anon < 2e6 and after.data - before.data < 2e6
    assert after.file - before.file > 15e6


def test_maps_outlive_the_file(store):
    """Saving again replaces the file; a map shows what was stored before."""
    store.save(0, {"w": torch.zeros(4)})
    mapped = store.map(0)["w"]
    store.save(0, {"w": torch.ones(4)})
    assert torch.equal(mapped, torch.zeros(4)) and torch.equal(store.map(0)["w"], torch.ones(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("bn1.weight"), "lack bn1.weight"),
        (lambda s: s.update({"conv1.weight": torch.zeros(8, 3, 5, 5)}), r"conv1.weight has shape \(8, 3, 5, 5\)"),
        (lambda s: s.update(other=torch.zeros(1)), "has no other"),
    ],
)
def test_weights_of_another_unit(chain, change, message):
    unit = chain.units[0]
    state = {name: torch.ones_like(tensor) for name, tensor in unit.module.state_dict().items()}
    change(state)
    before = {name: tensor.clone() for name, tensor in unit.module.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"unit {unit.name}.*{message}"):
        load_into(unit, state)
    assert all(torch.equal(unit.module.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_unit_in_memory_keeps_its_parameters(chain):
    unit = chain.units[0]
    parameters = dict(unit.module.named_parameters())
    load_into(unit, {name: torch.zeros_like(tensor) for name, tensor in unit.module.state_dict().items()})
    assert all(parameter is parameters[name] for name, parameter in unit.module.named_parameters())
    assert not unit.module.state_dict()["conv1.weight"].any()


def test_released_unit_takes_half_precision_weights_in_its_own_type(chain):
    unit = chain.units[0]
    state = {k: v.half() if v.is_floating_point() else v for k, v in unit.module.state_dict().items()}
    release(unit)
    load_into(unit, state)
    assert {p.dtype for p in unit.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_leaves_the_old_file(store, monkeypatch, code):
    path = store.save(0, {"w": torch.zeros(3)})

    def full(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfStorageError, match=r"no space left on the device while writing .*unit_000\.safetensors"):
        store.save(0, {"w": torch.ones(3)})
    assert torch.equal(store.load(0)["w"], torch.zeros(3))
    assert list(store.folder.iterdir()) == [path]


def test_other_write_errors_and_released_units(chain, store, monkeypatch):
    release(chain.units[0])
    with pytest.raises(CheckpointError, match=r"conv1.weight is not in memory"):
        store.save(0, chain.units[0])

    def denied(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", denied)
    with pytest.raises(CheckpointError, match=r"cannot write .*unit_001_layer1\.0\.safetensors: Input/output error\.$"):
        store.save(1, chain.units[1])
    assert list(store.folder.iterdir()) == []


def test_a_folder_that_became_a_file(store, tmp_path):
    """Nothing can be written there, nor removed."""
    shutil.rmtree(store.folder)
    store.folder.write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*a\.safetensors: Not a directory\.$"):
        write_tensors(store.folder / "a.safetensors", {})


def test_release_frees_the_users_model_too(chain):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1))
    made = Chain.from_module(model, SHAPE)
    release(made.units[0])
    assert model[0].weight.is_meta
    assert not model[1].weight.is_meta


def test_release_keeps_what_no_file_holds(store):
    made = Chain.from_module(ZOO["constants"]().eval(), SHAPE)
    x = torch.randn(2, *SHAPE)
    expected = made(x)
    store.save(0, made.units[0])
    release(made.units[0])
    load_into(made.units[0], store.load(0))
    assert torch.equal(made(x), expected)


@pytest.mark.parametrize("read", [UnitStore.load, UnitStore.map])
@pytest.mark.timeout(20)  # reading a pipe waits for who writes to it
def test_a_pipe_in_place_of_weights_is_refused(store, read):
    path = store.save(0, {"a": torch.ones(2)})
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="it is no regular file"):
        read(store, 0)
