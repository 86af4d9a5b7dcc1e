"""Files of tensors that are no such files, or whose header promises what they do not hold."""

import json
import os

import pytest
import torch

from snugfit._core.digests import FileDigest
from snugfit._training import tensorfile
from snugfit._training.tensorfile import Deferred, read_tensors, write_tensors
from snugfit.errors import CheckpointError


def header(path, **changes):
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **changes}
    text = json.dumps({"weight": entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    return path


def test_what_was_written_is_read(tmp_path):
    maps = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    write_tensors(tmp_path / "a.safetensors", {"maps": maps, "one": torch.tensor(1)})
    found = read_tensors(tmp_path / "a.safetensors")
    assert torch.equal(found["maps"], maps) and found["maps"].stride() == maps.stride()
    assert torch.equal(read_tensors(header(tmp_path / "b.safetensors"))["weight"], torch.zeros(3))


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
def test_a_header_that_promises_something_else_is_refused(tmp_path, changes):
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
        read_tensors(header(tmp_path / "a.safetensors", **changes))


def test_a_header_that_promises_more_than_the_file_holds_is_refused(tmp_path):
    path = header(tmp_path / "a.safetensors", shape=[5], data_offsets=[0, 20])
    with pytest.raises(CheckpointError, match=r"\(sizes in its header disagree with each other or the file\)"):
        read_tensors(path)
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=r"\(its header is longer than the file, or than any may be\)"):
        read_tensors(path)


def test_tensors_are_made_when_they_are_written(tmp_path):
    made = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    given = {"maps": Deferred(torch.empty_like(made, device="meta"), lambda: made), "one": torch.ones(2)}
    digest = write_tensors(tmp_path / "a.safetensors", given)
    found = read_tensors(tmp_path / "a.safetensors")
    assert torch.equal(found["maps"], made) and found["maps"].stride() == made.stride()
    assert digest == FileDigest.of(tmp_path / "a.safetensors")


def test_what_is_cut_out_of_a_tensor_is_read_in_rows(tmp_path):
    cut = torch.rand(6, 4).t()[1:3]
    write_tensors(tmp_path / "a.safetensors", {"cut": cut, "transposed": torch.rand(6, 4).t()})
    found = read_tensors(tmp_path / "a.safetensors")
    assert torch.equal(found["cut"], cut) and found["cut"].is_contiguous()
    assert found["transposed"].stride() == (1, 4)


def test_headers_are_padded_and_name_axes_only_where_there_are_any(tmp_path):
    for name in ("odd", "odder", "oddest", "even", "longer than that", *"abcdefgh"):  # headers of many lengths
        path = tmp_path / "a.safetensors"
        write_tensors(path, {name: torch.rand(2, 3)})
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
    with pytest.raises(CheckpointError, match=r"cannot read .*a\.safetensors: No such file or directory\. Start"):
        read_tensors(tmp_path / "a.safetensors")


def test_memory_that_is_refused_is_no_damage(tmp_path, monkeypatch):
    write_tensors(tmp_path / "a.safetensors", {"w": torch.ones(1)})

    def refused(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.")

    monkeypatch.setattr(tensorfile.torch, "empty", refused)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        read_tensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(tmp_path, make):
    make(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot read .*a\.safetensors: it is no regular file"):
        read_tensors(tmp_path / "a.safetensors")
