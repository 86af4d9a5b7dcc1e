"""Tables and conclusions drawn from result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_cells import finished, infeasible
from benchmarks import accuracy, budgets, lls, memory, overhead, photos, speed_tables, tables

MACHINE = {
    "hardware": "Abacus",
    "device": "cpu",
    "cores": 2,
    "system": "L",
    "python": "3",
    "torch": "2",
    "snugfit": "0",
}


def row_of(markdown: str, *words: str) -> list[str]:
    lines = [line for line in markdown.splitlines() if line.startswith("|") and all(word in line for word in words)]
    assert len(lines) == 1
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


def test_budgets_counts_what_held() -> None:
    over = finished("backprop", 1.0, memory="200MB")
    over["record"]["measured"]["peak_bytes"] = 101_000_000
    named = {**finished("backprop", 1.0, memory="90000000"), "named": True}
    cells = [finished("blockwise", 1.0), over, infeasible("backprop"), named]
    found = "\n".join(budgets.conclusions(cells))
    assert "3 finished, 1 infeasible, 0 failed" in found
    assert "measured <= budget: 2 of 3" in found
    assert "measured <= predicted: 2 of 3 runs, 3 of 3 phases" in found
    assert "names a budget that works: 1 of 1" in found
    assert "predicted without kept <= 1.05 x measured (target 90 %): 33.3 % of runs, 0.0 % of phases" in found
    assert row_of(budgets.render(cells), "blockwise")[-2] == "1.11"


def test_budgets_are_tight_without_the_room_for_kept_memory() -> None:
    roomy = finished("backprop", 1.0, memory="300MB")
    record = roomy["record"]
    record["predicted"]["peak_bytes"], record["measured"]["peak_bytes"] = 150_000_000, 98_000_000
    for phase in record["phases"]:
        phase |= {"predicted_peak_bytes": 150_000_000, "predicted_kept_bytes": 50_000_000}
    assert row_of(budgets.render([roomy]), "backprop")[4:8] == ["150.0", "50.0", "98.0", "1.02"]
    assert "x measured (target 90 %): 100.0 % of runs" in "\n".join(budgets.conclusions([roomy]))


def test_budgets_counts_a_named_budget_that_fails() -> None:
    failed = {**infeasible("backprop", memory="90000000"), "exit_code": 5, "named": True}
    assert "works: 0 of 1" in "\n".join(budgets.conclusions([infeasible("backprop"), failed]))


def test_speed_gives_ratios_to_blockwise() -> None:
    cells = [finished("blockwise", 10.0), finished("backprop", 35.0), infeasible("classic", memory="100MB")]
    cells.append({"arm": "backprop", "settings": cells[0]["settings"], "tightest_mb": 100, "repeat": 0, "commit": "a"})
    text = speed_tables.render(cells)
    assert row_of(text, "| backprop ")[5] == "3.50"
    assert "needs 90.0 MB" in row_of(text, "classic")[2]
    assert "backprop / blockwise at 100 MB, the tightest of backprop: 3.50" in text


def test_speed_compares_only_what_trained_alike() -> None:
    cells = [finished("blockwise", 10.0), finished("backprop", 35.0), finished("backprop", 90.0, epochs=9)]
    text = speed_tables.render(cells)
    assert text.count("| blockwise ") == 1 and text.count("| backprop ") == 2 and "epochs: 9" in text
    assert "backprop / blockwise at 100 MB: 3.50" in text and "9.00" not in text


def test_speed_takes_the_median_of_repetitions() -> None:
    cells = [{**finished("blockwise", seconds), "repeat": index} for index, seconds in enumerate((10.0, 90.0, 12.0))]
    assert row_of(speed_tables.render(cells), "| blockwise ")[2] == "12.0"


def test_accuracy_compares_pairs() -> None:
    full = finished("backprop", 1.0)
    full["record"]["accuracy"]["test"] = 0.52
    speeds = {str(batch): {"blockwise": 200.0, "backprop": 100.0} for batch in accuracy.BATCHES}
    timed = {**finished("throughput", 0.0), "images_per_second": speeds, "exit_code": 0}
    del timed["record"]
    text = accuracy.render([finished("blockwise", 1.0), full, timed])
    assert row_of(text, "1 of 4")[3:6] == ["-2.00", "a (1 of 4)", "10.0"]
    assert "throughput at batch 128, median: 2.00" in text


def test_waiting_for_photos_is_a_share_of_training() -> None:
    record = {"measured": {"data_seconds": 0.5, "decoded_bytes": 2_500_000}}
    cell = {"arm": "photos", "exit_code": 0, "record": record, "training_seconds": 20.0}
    settings = {"model": "vgg8", "image_size": 96}
    cells = [{**cell, "settings": {**settings, "storage": storage}} for storage in (None, "1MB")]
    table = photos.render(cells).splitlines()
    assert table[2] == "| vgg8 | 96 | once | 20.0 | 0.5 | 2.5 % | 2.5 |" and "in every epoch" in table[3]


def test_overhead_counts_once_what_happens_once() -> None:
    cell = finished("train", 100.0, epochs=2)
    assert overhead.whole_run_seconds(cell) == pytest.approx(100 + 50 / 2 * 18)
    assert overhead.profiling_share(cell) == pytest.approx(3 / 550)


def test_pages_get_the_newest_results_of_each_machine(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    for name, claims in tables.PAGES.items():
        text = "".join(f"{claim}\n<!-- tables: {claim} -->\nold\n<!-- end: {claim} -->\n" for claim in claims)
        (tmp_path / name).write_text(text)
    for claim in tables.RENDER:
        for date, seconds in (("2024-01-02", 10.0), ("2024-01-01", 70.0)):
            data = {"machine": MACHINE, "commands": [f"run {date}"], "cells": [finished("blockwise", seconds)]}
            (tmp_path / f"{claim}_abacus-2-cores_{date}.json").write_text(json.dumps({"claim": claim, **data}))
    assert tables.main(docs=tmp_path, results=tmp_path, check=True) == 1
    assert tables.main(docs=tmp_path, results=tmp_path) == 0
    text = (tmp_path / "benchmarks" / "speed.md").read_text()
    assert "](../../benchmarks/results/speed_abacus-2-cores_2024-01-02.json)" in text
    assert "run 2024-01-02" in text
    assert "run 2024-01-01" not in text
    assert "old" not in text
    assert "No results yet." in (tmp_path / "reliability.md").read_text()
    assert tables.main(docs=tmp_path, results=tmp_path, check=True) == 0


def test_every_claim_has_one_page() -> None:
    assert sorted(claim for claims in tables.QUESTIONS.values() for claim in claims) == sorted(tables.RENDER)


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="tables: speed"):
        tables.replace_section("nothing", "speed", "")


@pytest.mark.parametrize("name", tables.PAGES)
def test_the_real_pages_have_all_markers(name: str) -> None:
    text = (Path(tables.ROOT) / "docs" / name).read_text()
    for claim in tables.PAGES[name]:
        assert "x-body" in tables.replace_section(text, claim, "x-body")


def of_table(method: str, table: str, test: float, val: float, **settings: object) -> dict:
    cell = finished("blockwise", 1.0, model="smallconv", data="cifar10", max_train=100, **settings)
    cell["record"]["accuracy"] = {"test": test, "val": val, "test_top5": 1.0}
    cell["record"]["exits"] = [{"val_accuracy": 0.1}, {"val_accuracy": val}]
    return {**cell, "arm": table, "method": method}


def test_lls_sets_accuracies_beside_the_papers() -> None:
    cells = [of_table("square", "table1", test, 0.5, seed=seed) for seed, test in enumerate((0.70, 0.80, 0.75))]
    row = row_of(lls.render(cells), "| square ")
    assert row[5:9] == ["3", "75.00 %", "77.79 %", "100"] and row[9] == "-2.79"


def test_lls_choices_show_nothing_of_the_test_images() -> None:
    text = lls.render([of_table("mode=paper,frequencies=spread", "choices", 0.77, 0.55)])
    assert "55.00 %" in text and "77" not in text


def test_lls_trains_as_the_paper_says() -> None:
    rows = {(row.model, row.data): row for row in lls.TABLES["table1"]}
    given = {"epochs": 1, "max_train": None, "seed": 0}
    light = lls.settings_of(rows["smallconv", "cifar10"], lls.DEFAULTS, **given)
    heavy = lls.settings_of(rows["vgg8", "cifar10"], lls.DEFAULTS, **given)
    assert (light["crop"], light["erase"]) == (False, None) and (heavy["crop"], heavy["erase"]) == (True, 0.2)
    assert light["data"] == "cifar10" and light["optimizer"] == "schedulefree"
    assert [row.epochs for row in rows.values()] == [100, 100, 100, 100, 100, 100, 300, 300]


def test_memory_gives_the_share_of_backprops_peak() -> None:
    def cell(method: str, peak: int) -> dict:
        settings = {"model": "vgg8", "method": method, "batch_size": 128, "optimizer": "sgd"}
        return {"arm": method, "settings": settings, "peak_bytes": peak, "command": method, "repeat": 0, "commit": "a"}

    text = memory.render([cell("backprop", 800_000_000), cell("lls", 360_000_000)])
    assert row_of(text, "| lls ")[2:] == ["360.0", "0.45", "574", "0.53"]
    assert "vgg8, lls: 0.45 of backprop's peak (target: 0.5)" in text


def test_speed_sets_lls_beside_the_others() -> None:
    cells = [finished(arm, seconds) for arm, seconds in (("blockwise", 20.0), ("lls-mxm", 8.0))]
    for cell, training in zip(cells, (18.0, 6.0), strict=True):
        cell["training_seconds"] = training
    assert "blockwise / lls-mxm per epoch at 100 MB: 3.00 (target: at least 1.8)" in speed_tables.render(cells)


@pytest.mark.slow
def test_figure_5_2_is_as_the_paper_describes_it(tmp_path: Path) -> None:
    from benchmarks import tilecosts
    from benchmarks.tilecosts_figure import draw

    cell = tilecosts.count()
    macs, halos = cell["macs"], cell["halo_floats"]
    assert all(macs[each]["every"] < macs[each]["best"] < macs[each]["one"] for each in ("forward", "backward"))
    assert len(cell["profiles"]["forward"]["best"].split("|")) == 5
    assert halos["forward"]["best"] < halos["forward"]["every"] < halos["forward"]["one"]
    assert halos["backward"]["one"] < halos["backward"]["every"]
    assert all(each["one"] > each["every"] >= 1 for each in cell["ratios"]["forward"])
    assert cell["ratios"]["backward"][0]["one"] > 1.4 and cell["ratios"]["backward"][-1]["every"] > 3
    assert row_of(tilecosts.render([cell]), "| forward", "1 group ")[3] == "2.209"
    for name in ("a.svg", "b.svg"):
        draw(cell, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_weights_are_what_stops_larger_clusters() -> None:
    from benchmarks import tilescaling
    from benchmarks.yolo_tiles import layers

    few, many = (tilescaling.simulate(layers(), tilescaling.PI, count)["batches"][0] for count in (2, 16))
    assert few["baseline_seconds"] == pytest.approx(tilescaling.PAPER_STEP_SECONDS, rel=0.001)
    assert 2 < few["speedup"] < 8 and many["weights"] == pytest.approx(15 * few["weights"], rel=0.01)
    assert many["computing"] < few["computing"] / 7 and many["speedup_all_reduce"] > 3 * many["speedup"]
    cells = [{"device": {"name": "pi3", "cores": 4, "source": "made up"}, "count": 2, "grid": [2, 4], "batches": [few]}]
    assert "made up" in tilescaling.render(cells) and row_of(tilescaling.render(cells), "2x4")[2] == "7.6"
