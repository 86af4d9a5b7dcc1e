"""Files of tensors that are no such files, or whose header promises what they do not hold."""

import json
import os

import pytest
import torch

from snugfit.errors import CheckpointError
from snugfit.training.tensorfile import read_tensors, write_tensors


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


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(tmp_path, make):
    make(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot read .*a\.safetensors: it is no regular file"):
        read_tensors(tmp_path / "a.safetensors")
