"""Measurements that are kept: when they serve, and what a damaged or forbidden folder does."""

import json
from dataclasses import replace

import pytest

from snugfit._core.profile import ProbeLine, ProbePoint, TensorProfile
from snugfit.profiling.measurement_cache import ROOM, Measurement, Measurements

LINE = ProbeLine("p", 10.0, 2.0, 1.0, 0.1, 0.01, (ProbePoint(2, 14, 0.12), ProbePoint(8, 26, 0.18)), 2)
FOUND = Measurement(line=LINE, floors={"1": 5}, left_bytes=7)


def test_another_process_finds_what_was_kept(tmp_path):
    Measurements(tmp_path, "machine").keep("a conv", FOUND, 1000.0)
    other = Measurements(tmp_path, "machine")
    assert other.find("a conv", 1000.0) == replace(FOUND, available_bytes=1000)
    assert other.is_from_disk("a conv") and other.found == 1


def test_what_a_forked_process_made_is_not_counted_as_found_before(tmp_path):
    here = Measurements(tmp_path, "machine")
    Measurements(tmp_path, "machine").keep("a pool", FOUND, 1000.0)
    first, second = Measurements(tmp_path, "machine"), Measurements(tmp_path, "machine")
    first.keep("a conv", FOUND, 1000.0)
    assert first.find("a pool", 1000.0) and len(first.names_found) == len(first.names_made) == 1
    here.note_others(first.names_found, first.names_made)
    assert second.find("a conv", 1000.0) and second.is_from_disk("a conv")
    here.note_others(second.names_found, second.names_made)
    assert here.found == 1, "the pool"


@pytest.mark.parametrize(("machine", "what"), [("another machine", "a conv"), ("machine", "a pool"), ("machine", "")])
def test_another_machine_or_network_finds_nothing(tmp_path, machine, what):
    Measurements(tmp_path, "machine").keep("a conv", FOUND, 1000.0)
    assert Measurements(tmp_path, machine).find(what, 1000.0) is None


@pytest.mark.parametrize(
    ("then", "complete", "now", "serves"),
    [
        (1000.0, False, 900.0, True),
        (1000.0, False, 1030.0, True),
        (1000.0, False, 1100.0, False),
        (1000.0, True, 1e12, True),
        (float("inf"), False, 1e12, True),
        (1000.0, False, float("inf"), False),
    ],
)
def test_a_larger_budget_is_measured_anew_unless_all_was_measured(tmp_path, then, complete, now, serves):
    Measurements(tmp_path).keep("a conv", replace(FOUND, complete=complete), then)
    assert (Measurements(tmp_path).find("a conv", now) is not None) == serves


def test_a_line_of_more_images_than_fit_now_does_not_keep_fewer_from_being_tried(tmp_path):
    two = replace(LINE, smallest_batch=2, points=LINE.points[:1])
    Measurements(tmp_path).keep("a conv", replace(FOUND, line=two), 1000.0)
    needed = two.bytes_at(2)
    assert Measurements(tmp_path).find("a conv", needed) is not None
    assert Measurements(tmp_path).find("a conv", needed - 1) is None
    Measurements(tmp_path).keep("a conv", replace(FOUND, line=two, floors={"2": 5}), 1000.0)
    assert Measurements(tmp_path).find("a conv", needed - 1) is not None, "it cannot train on fewer than two"


def test_several_batch_sizes_are_not_trusted_where_only_the_smallest_might_fit(tmp_path):
    several = replace(FOUND, line=replace(LINE, shape_bytes=20.0), floors={"2": 5})
    one = replace(several, line=replace(several.line, points=LINE.points[:1]))
    enough = ROOM * (LINE.bytes_at(2) + 20)
    here = Measurements(tmp_path)
    here.keep("several", several, 1000.0)
    here.keep("one", one, 1000.0)
    assert Measurements(tmp_path).find("several", enough) is not None
    assert Measurements(tmp_path).find("several", enough - 1) is None
    assert Measurements(tmp_path).find("one", enough - 1) is not None, "measuring it again would not tell more"
    assert here.find("several", enough - 1) is not None, "this process has its kernels"


def test_what_did_not_fit_does_not_fit_less_memory_either(tmp_path):
    Measurements(tmp_path).keep("a conv", Measurement(), 1000.0)
    assert Measurements(tmp_path).find("a conv", 900.0).line is None
    assert Measurements(tmp_path).find("a conv", 2000.0) is None


def test_to_renew_is_to_find_only_what_this_process_measured(tmp_path):
    Measurements(tmp_path).keep("a conv", FOUND, 1000.0)
    anew = Measurements(tmp_path, renew=True)
    assert anew.find("a conv", 1000.0) is None
    anew.keep("a conv", replace(FOUND, left_bytes=8), 1000.0)
    assert anew.find("a conv", 1000.0).left_bytes == 8 and anew.found == 0
    assert Measurements(tmp_path).find("a conv", 1000.0).left_bytes == 8


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"line": {"name": "p"}}', '{"floors": 3, "line": 4}', '{"floors": {"[]": 3}}', "\x00"],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path, text):
    Measurements(tmp_path).keep("a conv", FOUND, 1000.0)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    found = Measurements(tmp_path).find("a conv", 1000.0)
    assert found is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    known = Measurements(blocked / "below", "machine")
    known.keep("a conv", FOUND, 1000.0)
    assert known.find("a conv", 1000.0).line == LINE


def test_files_are_plain_json_without_leftovers(tmp_path):
    for _ in range(3):
        Measurements(tmp_path).keep("a conv", FOUND, 1000.0)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["left_bytes"] == 7


def test_tensors_come_back_as_they_were(tmp_path):
    tensors = TensorProfile(operators=(), batch=4)
    Measurements(tmp_path).keep("a network", Measurement(tensors=tensors), 1000.0)
    assert Measurements(tmp_path).find("a network", 1000.0).tensors == tensors


def test_what_did_not_fit_is_measured_again_with_a_little_more_memory(tmp_path):
    """208 MB refused ResNet-18; with 211 it was not measured, and refused."""
    Measurements(tmp_path).keep("a conv", Measurement(floors={"2": 90}), 100)
    assert Measurements(tmp_path).find("a conv", 100) is not None
    assert Measurements(tmp_path).find("a conv", 101) is None


def test_what_fits_stays_in_the_folder_when_less_memory_refuses_it(tmp_path):
    line = ProbeLine("a conv", 10.0, 70.0, 0.0, 0.0, 0.1, (ProbePoint(2, 90, 0.1), ProbePoint(8, 150, 0.3)), 2)
    Measurements(tmp_path).keep("a conv", Measurement(line, floors={"1": 60}), 160)
    less = Measurements(tmp_path)
    assert less.find("a conv", 80) is None
    less.keep("a conv", Measurement(floors={"1": 60}), 80)
    assert less.find("a conv", 80).line is None, "this process need not measure it again"
    assert Measurements(tmp_path).find("a conv", 110).line == line
