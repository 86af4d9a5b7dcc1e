"""Files of tensors: their bytes, and what is refused because its header promises what it does not hold."""

import json
import os
import struct

import pytest
import torch

from snugfit._storage import tensor_file
from snugfit._storage.digests import FileDigest
from snugfit._storage.tensor_file import Deferred, describe_tensors, map_tensors, read_tensors, write_tensors
from snugfit.errors import CheckpointError

READERS = [read_tensors, map_tensors, describe_tensors]


def header(path, **changes):
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **changes}
    text = json.dumps({"weight": entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    return path


def test_what_was_written_is_read(tmp_path):
    maps = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    write_tensors(tmp_path / "a.safetensors", {"maps": maps, "one": torch.tensor(1)}, along_memory=True)
    for read in (read_tensors, map_tensors):
        assert torch.equal(read(tmp_path / "a.safetensors")["maps"], maps)
    found = read_tensors(tmp_path / "a.safetensors")
    assert describe_tensors(tmp_path / "a.safetensors")["maps"].stride() == maps.stride()
    assert found["maps"].stride() == maps.stride()
    assert torch.equal(read_tensors(header(tmp_path / "b.safetensors"))["weight"], torch.zeros(3))


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [10**12], "data_offsets": [0, 4 * 10**12]},  # it took memory before it looked at the file
        {"shape": [-3]},
        {"shape": [4]},
        {"data_offsets": [4, 16]},
        {"data_offsets": [-4, 8]},
        {"shape": "3"},
        {"dtype": "F31"},
    ],
)
def test_a_header_that_promises_something_else_is_refused(tmp_path, read, changes):
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
        read(header(tmp_path / "a.safetensors", **changes))


@pytest.mark.parametrize("read", READERS)
def test_a_header_that_promises_more_than_the_file_holds_is_refused(tmp_path, read):
    path = header(tmp_path / "a.safetensors", shape=[5], data_offsets=[0, 20])
    with pytest.raises(CheckpointError, match=r"\(sizes in its header disagree with the file\)"):
        read(path)
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=r"\(its header is longer than the file, or than any may be\)"):
        read(path)


@pytest.mark.parametrize("read", READERS)
def test_headers_of_any_length_are_not_read(tmp_path, monkeypatch, read):
    path = header(tmp_path / "a.safetensors")
    length = path.stat().st_size - 8 - 12
    monkeypatch.setattr(tensor_file, "MAX_BYTES", length)
    assert read(path)["weight"].shape == (3,)
    monkeypatch.setattr(tensor_file, "MAX_BYTES", length - 1)
    with pytest.raises(CheckpointError, match=r"\(its header is longer than"):
        read(path)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("places", [([0, 12], [0, 12]), ([0, 12], [8, 20]), ([0, 12], [16, 28])])
def test_tensors_that_overlap_or_leave_bytes_out_are_refused(tmp_path, read, places):
    """Many tensors of the same bytes would take many times the memory of the file."""
    entries = {
        name: {"dtype": "F32", "shape": [3], "data_offsets": place} for name, place in zip("ab", places, strict=True)
    }
    text = json.dumps(entries).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(places[1][1]))
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged \(its tensors overlap, or leave bytes out\)"):
        read(tmp_path / "a.safetensors")


@pytest.mark.parametrize("axes", [[0, 0], [0], [0, 2], "01", {"0": 1}, [0, "1"]])
def test_an_order_of_axes_that_is_none_is_refused(tmp_path, axes):
    data = {
        "__metadata__": {"axes": json.dumps({"w": axes})},
        "w": {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]},
    }
    text = json.dumps(data).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(6))
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
        read_tensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("shape", [[2**63, 0], [2**40, 2**40, 0], [3.0], [True, 3]])
def test_lengths_that_no_tensor_has(tmp_path, read, shape):
    end = 12 if 0 not in shape else 0
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
        read(header(tmp_path / "a.safetensors", shape=shape, data_offsets=[0, end]))


STATE = {
    "b": torch.arange(8.0).view(1, 2, 2, 2).to(memory_format=torch.channels_last),
    "a": torch.arange(3, dtype=torch.uint8),
    "c": torch.tensor(7),
}


def test_files_of_weights_keep_their_bytes(tmp_path):
    write_tensors(tmp_path / "a.safetensors", STATE)
    text = (
        b'{"c":{"dtype":"I64","shape":[],"data_offsets":[0,8]},'
        b'"b":{"dtype":"F32","shape":[1,2,2,2],"data_offsets":[8,40]},'
        b'"a":{"dtype":"U8","shape":[3],"data_offsets":[40,43]}}'
    )
    data = struct.pack("<q8f", 7, *range(8)) + bytes([0, 1, 2])
    assert (tmp_path / "a.safetensors").read_bytes() == padded(text) + data


def test_files_of_checkpoints_keep_their_bytes(tmp_path):
    deferred = Deferred(torch.empty(2), lambda: torch.ones(2))
    write_tensors(tmp_path / "a.safetensors", {**STATE, "e": deferred}, along_memory=True)
    text = (
        b'{"__metadata__": {"axes": "{\\"b\\": [0, 2, 3, 1]}"}, '
        b'"b": {"dtype": "F32", "shape": [1, 2, 2, 2], "data_offsets": [0, 32]}, '
        b'"a": {"dtype": "U8", "shape": [3], "data_offsets": [32, 35]}, '
        b'"c": {"dtype": "I64", "shape": [], "data_offsets": [35, 43]}, '
        b'"e": {"dtype": "F32", "shape": [2], "data_offsets": [43, 51]}}'
    )
    data = struct.pack("<8f3Bq2f", 0, 4, 1, 5, 2, 6, 3, 7, 0, 1, 2, 7, 1, 1)
    assert (tmp_path / "a.safetensors").read_bytes() == padded(text) + data


def padded(text):
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def test_tensors_are_made_when_they_are_written(tmp_path):
    made = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    given = {"maps": Deferred(torch.empty_like(made, device="meta"), lambda: made), "one": torch.ones(2)}
    digest = write_tensors(tmp_path / "a.safetensors", given, along_memory=True)
    found = read_tensors(tmp_path / "a.safetensors")
    assert torch.equal(found["maps"], made) and found["maps"].stride() == made.stride()
    assert digest == FileDigest.of(tmp_path / "a.safetensors")


def test_what_is_cut_out_of_a_tensor_is_read_in_rows(tmp_path):
    cut = torch.rand(6, 4).t()[1:3]
    write_tensors(tmp_path / "a.safetensors", {"cut": cut, "transposed": torch.rand(6, 4).t()}, along_memory=True)
    found = read_tensors(tmp_path / "a.safetensors")
    assert torch.equal(found["cut"], cut) and found["cut"].is_contiguous()
    assert found["transposed"].stride() == (1, 4)


def test_headers_are_padded_and_name_axes_only_where_there_are_any(tmp_path):
    for name in ("odd", "odder", "oddest", "even", "longer than that", *"abcdefgh"):  # headers of many lengths
        path = tmp_path / "a.safetensors"
        write_tensors(path, {name: torch.rand(2, 3)}, along_memory=True)
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        assert length % 8 == 0 and json.loads(content[8 : 8 + length]).keys() == {name}


def test_files_are_for_their_owner_to_write_and_for_no_one_to_run(tmp_path):
    before = os.umask(0o022)
    try:
        write_tensors(tmp_path / "a.safetensors", {"w": torch.ones(1)})
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_missing_file_is_told_in_words(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*a\.safetensors: No such file or directory\. Restore"):
        read_tensors(tmp_path / "a.safetensors")


def test_memory_that_is_refused_is_no_damage(tmp_path, monkeypatch):
    write_tensors(tmp_path / "a.safetensors", {"w": torch.ones(1)})

    def refused(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.")

    monkeypatch.setattr(tensor_file.torch, "empty", refused)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        read_tensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(tmp_path, make):
    make(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot read .*a\.safetensors: it is no regular file"):
        read_tensors(tmp_path / "a.safetensors")
