"""Energy counters: whole packages, wrap-around, and machines without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from snugfit._training.run import EnergyMeter


def zone(root: Path, name: str, energy: int, most: int = 1_000_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder / "energy_uj"


def test_a_machine_without_counters_counts_nothing(tmp_path):
    meter = EnergyMeter(tmp_path / "nowhere")
    assert not meter.counts and meter.spent() == 0


def test_packages_add_up_and_their_parts_do_not_count(tmp_path):
    first, second = zone(tmp_path, "intel-rapl:0", 5_000_000), zone(tmp_path, "intel-rapl:1", 7_000_000)
    part = zone(tmp_path, "intel-rapl:0:0", 1_000_000)
    meter = EnergyMeter(tmp_path)
    for path, value in ((first, 6_500_000), (second, 7_250_000), (part, 900_000_000)):
        path.write_text(str(value))
    assert meter.counts and meter.spent() == pytest.approx(1.75)
    assert meter.spent() == 0, "what was told is not told again"


def test_a_counter_that_starts_again_from_zero(tmp_path):
    path = zone(tmp_path, "intel-rapl:0", 990_000_000)
    meter = EnergyMeter(tmp_path)
    path.write_text("15000000")
    assert meter.spent() == pytest.approx(25.0)


def test_a_counter_that_may_not_be_read_is_left_out(tmp_path):
    zone(tmp_path, "intel-rapl:0", 1).write_text("not a number")
    assert not EnergyMeter(tmp_path).counts
