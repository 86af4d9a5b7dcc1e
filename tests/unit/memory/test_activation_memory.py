"""Equations 1 to 6 against a walk that fills and empties memory layer by layer, and by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugfit._core.serial import from_data, to_data
from snugfit.memory.activation import ActivationMemory, LayerRecord, add_up

THREE = [
    LayerRecord("a", 0, 100, 10),
    LayerRecord("b", 1, 50, 20),
    LayerRecord("c", 1, 90, 0),
    LayerRecord("d", 2, 5, 70),
]


def test_by_hand():
    found = add_up(("one", "two", "three"), THREE, parameter_bytes=1000, batch=8)
    first, second, third = found.blocks
    assert (first.temporary_bytes, first.cumulative_bytes, first.peak_bytes) == (100, 10, 100)
    assert (second.temporary_bytes, second.cumulative_bytes, second.peak_bytes) == (90, 30, 90 + 30)
    assert (third.temporary_bytes, third.cumulative_bytes, third.peak_bytes) == (5, 100, 35)
    assert (found.peak_bytes, found.peak_block, found.cumulative_bytes) == (120, 1, 100)
    assert found.total_bytes == 8 * 120 + 1000
    assert [layer.cumulative_bytes for layer in second.layers] == [10, 30]


def test_sensitive_blocks_take_more_than_is_kept_in_all():
    records = [LayerRecord("a", 0, 31, 10), LayerRecord("b", 1, 30, 20), LayerRecord("c", 2, 29)]
    assert add_up("xyz", records, parameter_bytes=0).sensitive() == (0,)


@given(
    st.lists(st.tuples(st.integers(0, 3), *[st.integers(0, 99)] * 2), min_size=1, max_size=12),
    st.integers(1, 9),
)
def test_peaks_are_those_of_a_step_that_is_walked_through(rows, batch):
    order = {block: number for number, block in enumerate(dict.fromkeys(sorted(row[0] for row in rows)))}
    records = [LayerRecord(str(index), order[row[0]], *row[1:]) for index, row in enumerate(rows)]
    found = add_up([str(number) for number in range(len(order))], records, parameter_bytes=3, batch=batch)
    kept, peaks = [], dict.fromkeys(range(len(order)), 0)
    for record in records:
        peaks[record.block] = max(peaks[record.block], sum(kept) + record.temporary_bytes)
        kept.append(record.kept_bytes)
    assert found.cumulative_bytes == sum(kept)
    assert [block.peak_bytes for block in found.blocks] == list(peaks.values())
    assert found.peak_bytes == peaks[found.peak_block] == max(peaks.values())
    assert found.total_bytes == batch * found.peak_bytes + 3


def test_it_is_written_and_read_as_json():
    found = add_up(("one", "two", "three"), THREE, parameter_bytes=1000, batch=8)
    assert from_data(ActivationMemory, json.loads(json.dumps(to_data(found)))) == found


@pytest.mark.parametrize("names", [("one", "two"), ("one", "two", "three", "four")])
def test_blocks_without_layers_and_layers_without_blocks_are_refused(names):
    with pytest.raises(ValueError, match="every block must have layers"):
        add_up(names, THREE, parameter_bytes=0, batch=8)
