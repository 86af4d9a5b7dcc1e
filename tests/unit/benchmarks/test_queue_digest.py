"""Which sources a queued run depends on."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.queue import digest


class TestDigest:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        files = {
            "": "", "strategies": "", "_data": "", "_report": "x = 1", "local": "", "_models": "", "tiling": "y = 2",
            "strategies/backprop": "",
            "strategies/backprop/strategy": "from snugfit.local import loss\nfrom snugfit._report import x\n",
            "local/loss": '"""Loss."""\ndef f():\n    """Do."""\n    return 1  # one\n', "local/other": "",
            "_models/vgg": 'MODELS = {"vgg11": 1}', "_models/resnet": 'MODELS = {"resnet18": 1}',
            **{f"_data/{name}": "" for name in ("batches", "split", "transform")},
            "_engine": "", "_engine/builder": "", "_engine/history": "",
            "_training/initial_weights": "", "_storage/tensor_file": "",
        }  # fmt: skip
        for name, text in files.items():
            folder = tmp_path / "src" / "snugfit" / name
            path = (
                folder.with_suffix(".py") if "/" in name and name != "strategies/backprop" else folder / "__init__.py"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "src"

    def test_reaches_what_is_imported_or_loaded_by_name_and_stops_at_what_learns_nothing(self, source: Path) -> None:
        found = digest.reached(["snugfit.strategies.backprop.strategy"], source)
        local = [f"snugfit.local{name}" for name in ("", ".loss", ".other")]
        strategies = [f"snugfit.strategies{name}" for name in ("", ".backprop", ".backprop.strategy")]
        assert found == [*local, *strategies]

    @pytest.mark.parametrize(
        ("name", "text", "same"),
        [
            ("local/loss.py", '"""Another."""\nimport os\n\n\ndef f():\n    """Do it."""\n    return 1\n', True),
            ("local/loss.py", "def f():\n    return 2\n", False),
            ("local/other.py", "z = 1", False),
            ("strategies/backprop/strategy.py", "from snugfit.local import loss\nz = 1\n", False),
            ("_models/vgg.py", 'MODELS = {"vgg11": 2}', False),
            ("_models/resnet.py", 'MODELS = {"resnet18": 2}', True),
            ("_data/split.py", "z = 1", False),
            ("_engine/builder.py", "seed = 1", False),
            ("_engine/history.py", "seed = 1", True),
            ("_report/__init__.py", "x = 2", True),
            ("tiling/__init__.py", "y = 3", True),
        ],
    )
    def test_changes_with_the_code_that_matters(self, source: Path, name: str, text: str, same: bool) -> None:
        before = digest.digest_of("backprop", "vgg11", source)
        (source / "snugfit" / name).write_text(text)
        assert (digest.digest_of("backprop", "vgg11", source) == before) == same

    def test_stays_when_code_moves_to_another_file(self, source: Path) -> None:
        before = digest.digest_of("backprop", "vgg11", source)
        local = source / "snugfit" / "local"
        (local / "base.py").write_text((local / "loss.py").read_text())
        (local / "loss.py").write_text("from snugfit.local.base import f\n")
        assert digest.digest_of("backprop", "vgg11", source) == before

    def test_depends_on_all_models_where_none_declares_the_name(self, source: Path) -> None:
        before = digest.digest_of("backprop", "torchvision:x", source)
        (source / "snugfit" / "_models" / "resnet.py").write_text("z = 1")
        assert digest.digest_of("backprop", "torchvision:x", source) != before

    def test_a_peer_depends_on_its_script(self, source: Path) -> None:
        script = source.parent / "benchmarks" / "plain.py"
        script.parent.mkdir()
        script.write_text("x = 1")
        before = digest.digest_of("benchmarks.plain", "vgg11", source)
        script.write_text("x = 2")
        assert digest.digest_of("benchmarks.plain", "vgg11", source) != before

    def test_the_real_arms_depend_on_what_they_train(self) -> None:
        strategies = ("blockwise", "backprop", "checkpoint", "benchmarks.peer")
        sources = {("blockwise", "resnet18"), *((name, "vgg11") for name in strategies)}
        assert len({digest.digest_of(*each) for each in sources}) == len(sources)

    def test_what_chooses_within_a_budget_does_not_matter(self, source: Path) -> None:
        planning = source / "snugfit" / "strategies" / "blockwise" / "modules.py"
        planning.parent.mkdir()
        (planning.parent / "__init__.py").write_text("")
        digests = []
        for text in ("x = 1", "x = 2"):
            planning.write_text(text)
            digests.append(digest.digest_of("blockwise", "vgg11", source))
        assert digests[0] == digests[1]

    def test_the_real_package_has_the_files_that_are_named(self) -> None:
        named = {*digest.NEUTRAL, *digest.FIRST, *digest.SHARED, *digest.LOADED_BY_NAME}
        assert [name for name in sorted(named) if not digest._file(name, digest.SOURCE).is_file()] == []

    def test_the_real_strategy_reaches_what_training_is_made_of(self) -> None:
        found = digest.reached([*digest._contents("snugfit.strategies.blockwise", digest.SOURCE), *digest.SHARED])
        for name in ("_training.loop", "_training.optimizers", "local.look_ahead", "_data.small_images", "lean"):
            assert f"snugfit.{name}" in found
        assert not {"snugfit._data.coco", "snugfit._storage.manifest", "snugfit._report"} & {*found}
