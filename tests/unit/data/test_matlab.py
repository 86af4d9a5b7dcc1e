"""The reader of MATLAB files against scipy, which writes and reads them too; and what no reader may trust."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snugfit._data.matlab import read_vectors
from snugfit.errors import DataError

scipy_io = pytest.importorskip("scipy.io")
TYPES = ["float64", "float32", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(TYPES),
    st.lists(st.integers(0, 120), min_size=1, max_size=30),
    st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF), min_size=1, max_size=9), min_size=1),
    st.booleans(),
    st.booleans(),
)
def test_reads_what_scipy_writes(tmp_path_factory, kind, numbers, names, compressed, upright):
    path = tmp_path_factory.mktemp("mat") / "list.mat"
    cells = np.array([*names, None], dtype=object)[:-1]
    rows = {"labels": np.array(numbers, dtype=kind), "names": cells, "more": {"x": 1}}
    scipy_io.savemat(path, rows, do_compression=compressed, oned_as="column" if upright else "row")
    read = scipy_io.loadmat(path)
    found = read_vectors(path, numbers=["labels"], texts=["names"])
    assert found["labels"] == [f"{value:g}" for value in read["labels"].ravel()] == [str(value) for value in numbers]
    assert found["names"] == [cell.item() for cell in read["names"].ravel()] == names


def test_files_of_other_machines_are_read(tmp_path):
    def element(kind, data):
        return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

    array = element(6, struct.pack(">II", 6, 0)) + element(5, struct.pack(">ii", 1, 3)) + element(1, b"labels")
    array += element(4, struct.pack(">HHH", 7, 300, 2))
    header = b"MATLAB 5.0".ljust(124) + b"\1\0MI"
    (tmp_path / "big.mat").write_bytes(header + element(14, array))
    assert read_vectors(tmp_path / "big.mat", numbers=["labels"]) == {"labels": ["7", "300", "2"]}
    assert scipy_io.loadmat(tmp_path / "big.mat")["labels"].tolist() == [[7, 300, 2]]


def refuse(path, match, content=None):
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=match):
        read_vectors(path, numbers=["labels"])


def test_a_variable_unpacks_to_no_more_than_a_list_can_have(tmp_path, monkeypatch):
    """64 MB in 64 kB, taken in only up to the limit."""
    monkeypatch.setattr("snugfit._data.matlab._LARGEST", 1 << 20)
    bomb = zlib.compress(bytes(1 << 26))
    header = b"MATLAB 5.0".ljust(124) + b"\0\1IM"
    refuse(
        tmp_path / "bomb.mat", "it unpacks to over 1,048,576 bytes", header + struct.pack("<II", 15, len(bomb)) + bomb
    )


def test_every_change_of_a_byte_is_read_or_refused(tmp_path):
    """Some of them end a process that reads the file with scipy."""
    path, rng = tmp_path / "list.mat", np.random.default_rng(0)
    scipy_io.savemat(path, {"labels": np.arange(1, 9), "names": np.array(["a", "bc"], dtype=object)})
    whole = path.read_bytes()
    for place in range(116, len(whole)):
        for value in (0, 1, 0x7F, 0xFF, int(rng.integers(256))):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                found = read_vectors(path, numbers=["labels"], texts=["names"])
                assert len(found["labels"]) == 8 and len(found["names"]) == 2
            except DataError as error:
                assert str(path) in str(error)


def test_cells_within_cells_are_no_texts(tmp_path):
    inner = np.array(["x"], dtype=object)
    for _ in range(200):
        inner = np.array([inner, None], dtype=object)[:1]
    scipy_io.savemat(tmp_path / "deep.mat", {"names": inner})
    with pytest.raises(DataError, match="a cell of type cell"):
        read_vectors(tmp_path / "deep.mat", texts=["names"])
